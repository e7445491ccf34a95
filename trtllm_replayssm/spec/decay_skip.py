"""Skipping checkpoint reads by decay (paper, Appendix F): the rule, its bound and the bytes it saves.

The checkpoint S of a head enters a step only as gamma S, with gamma the product of the decays since it was written. A
head has faded when gamma <= eps. Its step then uses S = 0: it reads no checkpoint, and a flush becomes a pure write.

Bound. Let M be the largest Euclidean norm of a row (over d_k) of any checkpoint that the run without skipping has
written so far. Then the states of the two runs differ by at most eps / (1 - 2 eps) M in the norm of each row, and an
output element by that times |q|, for both families, all decays in [0, 1], any window, and any number of flushes:
Mamba-2 states differ by what was dropped, decayed. In a gated delta rule with beta in [0, 1] and |k| <= 1, each step
multiplies a difference by alpha (I - beta k k^T), whose norm is at most alpha; where the skipping run drops
gamma S', with S' within D of S, the difference becomes at most gamma (|S| + 2 D), hence the denominator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.shapes import SsmShape
from trtllm_replayssm.spec.cursors import Cursors, commit, flushes
from trtllm_replayssm.spec.traffic import step_bytes

Array = NDArray[np.float64]


def faded(log_decays: Sequence[Array], skip_below: float) -> NDArray[np.bool_]:
    """Heads whose cumulative decay over `log_decays` (each [H]) is at most `skip_below`, in (0, 1/4]."""
    if not 0.0 < skip_below <= 0.25:
        raise ContractError("decay skip", "skip_below", expected="in (0, 1/4]", got=skip_below)
    return np.asarray(np.sum(log_decays, axis=0) <= math.log(skip_below))


def skip_bound(skip_below: float, largest_row: float) -> float:
    """Largest norm of a row of the difference of two states, see above; times |q|: of an output element."""
    return skip_below / (1.0 - 2.0 * skip_below) * largest_row


def decays_seen(config: ReplayConfig, h: int, num_tokens: int) -> int:
    """Decays in the product that a step's decision is made on.

    A step's first token decays the checkpoint before any output, so it counts; in a flush it does not, as the
    checkpoint is folded before it.
    """
    return h if flushes(config, h, num_tokens) else h + 1


def live_shares(log_decays: Array, skip_below: float, most: int) -> Array:
    """Share of heads not faded after n = 0..most tokens, over all starts: log_decays [tokens, ...heads] -> [most + 1].

    The paper's question of which heads fade within a window, answered for measured decays.
    """
    if len(log_decays) < most:
        raise ContractError("decay skip", "log_decays", expected=f"at least {most} tokens", got=len(log_decays))
    starts = len(log_decays) - most + 1
    total = np.zeros((starts, *log_decays.shape[1:]))
    shares = [1.0]
    for n in range(most):
        total = total + log_decays[n : n + starts]
        shares.append(float((total > math.log(skip_below)).mean()))
    return np.array(shares)


def skipping_bytes_per_token(
    shape: SsmShape, config: ReplayConfig, live: Sequence[float], step_tokens: int, accepted: int, act_itemsize: int = 2
) -> tuple[float, float]:
    """(without, with skipping) bytes of state and records per committed token of one layer, over a steady window.

    live: share of heads that still need the checkpoint after n decays, n = 0..L, as `live_shares` gives it.
    """
    cursors, seen = Cursors(), {}
    plain, skipping, position = [0.0], [0.0], [0]
    while cursors.h not in seen:
        seen[cursors.h] = len(plain) - 1
        step = step_bytes(shape, config, cursors.h, step_tokens, act_itemsize)
        needed = live[min(decays_seen(config, cursors.h, step_tokens), len(live) - 1)]
        plain.append(plain[-1] + step.total)
        skipping.append(skipping[-1] + step.total - step.state_read * (1.0 - needed))
        commit(config, cursors, step_tokens, accepted)
        position.append(cursors.position)
    first = seen[cursors.h]
    tokens = position[-1] - position[first]
    return (plain[-1] - plain[first]) / tokens, (skipping[-1] - skipping[first]) / tokens
