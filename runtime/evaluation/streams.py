"""What an evaluation decodes: consecutive tokens of texts, one row for each text and seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_replayssm.checks import read_text
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A row: `ids` are the prompt and the tokens it is forced to, `seed` keys its stochastic rounding.

    text: where they come from; digest: of the whole text.
    """

    text: str
    seed: int
    ids: tuple[int, ...]
    digest: str

    @property
    def label(self) -> str:
        """Text and seed."""
        return f"{self.text} seed {self.seed}"


def text_streams(tokenizer: Tokenizer, files: Sequence[Path], seeds: Sequence[int], tokens: int) -> list[Stream]:
    """A stream of `tokens` tokens from the start of each file, for each seed. A shorter text is repeated.

    The name of a stream is the file's without folder and suffix. Raises ConfigError for a file that is empty or
    cannot be read.
    """
    streams = []
    for path in files:
        ids = list(tokenizer.encode(read_text("eval", "--text", path), add_special_tokens=False))
        if not ids:
            raise ConfigError("eval", "--text", expected="a file with text", got=f"{path}: no tokens")
        repeated = tuple((ids * (-(-tokens // len(ids))))[:tokens])
        digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
        streams += [Stream(text=path.stem, seed=seed, ids=repeated, digest=digest) for seed in seeds]
    return streams
