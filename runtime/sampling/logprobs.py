"""Log-probabilities of emitted tokens: from the raw logits, before any penalty, temperature or filter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trtllm_replayssm.runtime.sampling.distribution import Logits
from trtllm_replayssm.runtime.sampling.leaders import falling, leaders

_BLOCK = 8192  # logits at a time: a float64 copy of all is new memory from the system for each token


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, and its rank (1 is the most likely; ties share a rank)."""

    logprob: float
    rank: int


class TokenLogprobs(Mapping[int, Logprob]):
    """Token id -> Logprob: the drawn token first, then the best in falling order. Not to be changed.

    A long answer keeps thousands of these. Three tuples of numbers hold an entry, which the garbage collector stops
    following at once; a dict of objects for each would make each full collection, which holds every thread, walk
    hundreds of thousands of them.
    """

    __slots__ = ("_logprobs", "_ranks", "_tokens")

    def __init__(self, entries: Mapping[int, Logprob]) -> None:
        """entries: in the order in which they are listed."""
        self._tokens = tuple(entries)
        self._logprobs = tuple(entry.logprob for entry in entries.values())
        self._ranks = tuple(entry.rank for entry in entries.values())

    def __getitem__(self, token: int) -> Logprob:
        try:
            at = self._tokens.index(token)
        except ValueError:
            raise KeyError(token) from None
        return Logprob(self._logprobs[at], self._ranks[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"TokenLogprobs({dict(self)})"


def token_logprobs(logits: Logits, token: int, top: int) -> TokenLogprobs:
    """Logits [V] -> the drawn token's entry first, then the `top` best in falling order (lowest id first on ties)."""
    best = float(logits.max())
    blocks = range(0, logits.size, _BLOCK)
    total = math.log(sum(float(np.exp(logits[i : i + _BLOCK].astype(np.float64) - best).sum()) for i in blocks))
    rank = int(np.count_nonzero(logits > logits[token])) + 1
    entries = {token: Logprob(float(logits[token]) - best - total, rank)}
    top = min(top, logits.size)
    if top:
        order = falling(logits, leaders(logits, top))
        negated = -logits[order]
        ranks = np.searchsorted(negated, negated[:top], side="left") + 1  # whoever is better is among the leaders
        for found, logit, place in zip(order[:top].tolist(), logits[order[:top]].tolist(), ranks.tolist(), strict=True):
            entries.setdefault(found, Logprob(logit - best - total, place))
    return TokenLogprobs(entries)
