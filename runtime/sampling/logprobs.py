"""Log-probabilities of emitted tokens: from the raw logits, before any penalty, temperature or filter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trtllm_replayssm.runtime.sampling.distribution import Logits


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, and its rank (1 is the most likely; ties share a rank)."""

    logprob: float
    rank: int


TokenLogprobs = dict[int, Logprob]


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Logits [V] -> the drawn token's entry first, then the `top` best in falling order (lowest id first on ties)."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    entries = {token: Logprob(float(scores[token]), int((scores > scores[token]).sum()) + 1)}
    top = min(top, scores.size)
    if top:
        threshold = np.partition(scores, scores.size - top)[scores.size - top]
        candidates = np.flatnonzero(scores >= threshold)
        for best in candidates[np.argsort(-scores[candidates], kind="stable")][:top]:
            entries.setdefault(int(best), Logprob(float(scores[best]), int((scores > scores[best]).sum()) + 1))
    return entries
