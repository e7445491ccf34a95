"""From logits to tokens: request settings, distributions, log-probabilities. numpy only."""
