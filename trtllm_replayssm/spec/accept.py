"""Acceptance of drafts: greedy, and the two lossless rules of speculative sampling.

A row is a base token and n drafts; the model gives one distribution p_s after each of its n + 1 tokens, taken after
temperature, filters and penalties. `position` is the absolute position of the first emitted token: token i stands at
position + i, and its random numbers are keyed by the request's seed and that position alone. With one-hot drafts
sampled speculation therefore emits what sampled plain decoding emits for the same seed.

Source of the general rule: Leviathan et al., 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.spec.philox import Domain, uniform

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Accepted:
    """tokens: what is emitted, accepted drafts first and one more token last; accepted: how many drafts were."""

    tokens: tuple[int, ...]
    accepted: int

    @property
    def committed(self) -> int:
        """Tokens of the step to commit: the base token and the accepted drafts."""
        return self.accepted + 1


def greedy_accept(rows: NDArray[np.generic], drafts: Sequence[int]) -> Accepted:
    """Emit the argmax after each token, as long as it equals the draft.

    rows: logits or probabilities [n + 1, V], or the argmax ids [n + 1] themselves; ties go to the lower id.
    """
    rows = np.asarray(rows)
    if rows.ndim not in (1, 2) or len(rows) != len(drafts) + 1:
        raise ContractError("greedy_accept", "rows", expected=f"[{len(drafts) + 1}] or that by V", got=rows.shape)
    best = rows if rows.ndim == 1 else rows.argmax(-1)
    accepted = 0
    while accepted < len(drafts) and int(best[accepted]) == drafts[accepted]:
        accepted += 1
    return Accepted(tuple(int(t) for t in best[: accepted + 1]), accepted)


def accept_one_hot(p: Array, drafts: Sequence[int], seed: int, position: int) -> Accepted:
    """Drafts that were not sampled (n-gram, argmax): draw y_s ~ p_s and stop at the first y_s that is not the draft.

    p: [n + 1, V], rows of any positive total; with no drafts this is plain sampling.
    """
    p = _distributions("accept_one_hot", "p", p, len(drafts) + 1)
    tokens: list[int] = []
    for s, row in enumerate(p):
        tokens.append(draw(row, uniform(seed, position + s, Domain.TOKEN)))
        if s == len(drafts) or tokens[-1] != drafts[s]:
            break
    return Accepted(tuple(tokens), len(tokens) - 1)


def accept_general(p: Array, q: Array, drafts: Sequence[int], seed: int, position: int) -> Accepted:
    """Drafts sampled from q: accept d_s iff u q_s(d_s) < p_s(d_s), else draw from the normalised (p_s - q_s)+.

    p: [n + 1, V]; q: [n, V], the distributions that the drafts were really drawn from; rows of any positive total.
    A draft with p = 0 is never accepted. (p - q)+ is empty only when p = q, where a draft drawn from q cannot be
    rejected; a foreign draft can, and the token is then drawn from p.
    """
    p = _distributions("accept_general", "p", p, len(drafts) + 1)
    q = _distributions("accept_general", "q", q, len(drafts), vocab=p.shape[1])
    for s, draft in enumerate(drafts):
        if not 0 <= draft < p.shape[1]:
            raise ContractError("accept_general", f"drafts[{s}]", expected=f"0..{p.shape[1] - 1}", got=draft)
        target, drafted = p[s] / p[s].sum(), q[s] / q[s].sum()
        if uniform(seed, position + s, Domain.ACCEPT) * drafted[draft] < target[draft]:
            continue
        residual = np.maximum(target - drafted, 0.0)
        token = draw(residual if residual.any() else target, uniform(seed, position + s, Domain.RESIDUAL))
        return Accepted((*map(int, drafts[:s]), token), s)
    token = draw(p[-1], uniform(seed, position + len(drafts), Domain.TOKEN))
    return Accepted((*map(int, drafts), token), len(drafts))


def draw(weights: Array, u: float) -> int:
    """Inverse CDF in vocabulary order: the first index whose cumulative weight exceeds u times the total.

    weights: [V] float64, not negative, positive total; u in [0, 1). An index of weight 0 is never drawn.
    """
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    if index == len(cumulative):  # a subnormal total: u * total rounded up to it
        index = int(np.flatnonzero(weights)[-1])
    return index


def _distributions(operation: str, name: str, rows: Array, count: int, vocab: int | None = None) -> Array:
    rows = np.asarray(rows, np.float64)
    wide = rows.ndim == 2 and (rows.shape[1] > 0 if vocab is None else rows.shape[1] == vocab)
    if rows.shape[:1] != (count,) or (count and not wide):
        raise ContractError(operation, name, expected=[count, "V" if vocab is None else vocab], got=list(rows.shape))
    total = rows.sum(-1)
    if count and not (rows.min() >= 0 and total.min() > 0 and np.isfinite(total).all()):
        raise ContractError(
            operation, name, expected="finite rows, not negative, with a positive total", got="another row"
        )
    return rows
