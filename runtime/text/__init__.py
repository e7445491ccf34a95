"""From token ids to text: tokenizers, incremental decoding, stop strings."""
