"""Log-probabilities of emitted tokens: from the raw logits, before any penalty, temperature or filter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trtllm_replayssm.runtime.sampling.distribution import Logits


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

    def __init__(self, entries: Mapping[int, Logprob] | Iterable[tuple[int, Logprob]]) -> None:
        """entries: in the order in which they are listed."""
        listed = dict(entries)
        self._tokens = tuple(listed)
        self._logprobs = tuple(entry.logprob for entry in listed.values())
        self._ranks = tuple(entry.rank for entry in listed.values())

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
    return TokenLogprobs(entries)
