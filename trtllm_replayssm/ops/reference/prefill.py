"""Prompt chunks: chunkwise scans of both recurrences from an initial state, one sequence at a time, float32.

Decay weights inside a chunk are sums over exactly the tokens between two positions, never differences of prefix
sums. GDN corrections of a chunk come from one unit triangular solve (the UT transform; paper, Eq. 10).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtllm_replayssm.ops.reference.gdn import key_factor
from trtllm_replayssm.shapes import SsmShape

CHUNK = 64


def mamba2_scan(
    shape: SsmShape, state: Tensor, x: Tensor, k: Tensor, q: Tensor, dt: Tensor, a: Tensor
) -> tuple[Tensor, Tensor]:
    """state [H, P, N] float32; x [n, H, P], k, q [n, G, N], dt [n, H] after softplus, a [H] -> (o [n, H, P], state).

    The D skip is the caller's.
    """
    outputs = []
    for start in range(0, len(x), CHUNK):
        part = slice(start, start + CHUNK)
        value = (x[part].float() * dt[part, :, None]).transpose(0, 1)
        key, query = _heads_first(shape, k[part].float()), _heads_first(shape, q[part].float())
        between, before = _chunk_decays((dt[part] * a).T)
        mixed = (query @ key.transpose(1, 2)) * between.exp()
        outputs.append(mixed @ value + before.exp()[..., None] * (query @ state.transpose(1, 2)))
        state = _advance(state, between, before, value, key)
    return torch.cat(outputs, dim=1).transpose(0, 1), state


def gdn_scan(
    shape: SsmShape, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """state [H, P, N] float32; raw q, k [n, G, N], v [n, H, P], g, beta [n, H] -> (o [n, H, P], new state)."""
    outputs = []
    scale = 1.0 / math.sqrt(shape.state_dim)
    for start in range(0, len(v), CHUNK):
        part = slice(start, start + CHUNK)
        key = _heads_first(shape, k[part].float() * key_factor(k[part])[..., None])
        query = _heads_first(shape, q[part].float() * (key_factor(q[part]) * scale)[..., None])
        rate = beta[part].T[..., None]
        between, before = _chunk_decays(g[part].T)
        weights = between.exp()
        known = v[part].float().transpose(0, 1) - before.exp()[..., None] * (key @ state.transpose(1, 2))
        lower = (rate * (key @ key.transpose(1, 2)) * weights).tril(-1)
        unit = lower + torch.eye(lower.shape[-1], device=lower.device)
        u = torch.linalg.solve_triangular(unit, rate * known, upper=False, unitriangular=True)
        mixed = (query @ key.transpose(1, 2)) * weights
        outputs.append(mixed @ u + before.exp()[..., None] * (query @ state.transpose(1, 2)))
        state = _advance(state, between, before, u, key)
    return torch.cat(outputs, dim=1).transpose(0, 1), state


def _heads_first(shape: SsmShape, grouped: Tensor) -> Tensor:
    """[n, G, N] -> [H, n, N]."""
    return grouped.transpose(0, 1).repeat_interleave(shape.heads_per_group, dim=0)


def _chunk_decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """log_decay [H, n] -> (between [H, n, n], before [H, n]).

    between[t, j] = sum of log_decay over j < i <= t, -inf for j > t; before[t] = sum over i <= t.
    """
    n = log_decay.shape[-1]
    ones = torch.ones((n, n), dtype=torch.bool, device=log_decay.device)
    zero = torch.zeros((), device=log_decay.device)
    terms = torch.where(ones.tril(-1), log_decay[..., :, None], zero)  # token i contributes to every j < i
    between = torch.where(ones.tril(), terms.cumsum(-2), torch.tensor(-math.inf, device=log_decay.device))
    return between, log_decay.cumsum(-1)


def _advance(state: Tensor, between: Tensor, before: Tensor, value: Tensor, key: Tensor) -> Tensor:
    """The state after the chunk: decayed by all of it, plus each token's outer product decayed since."""
    weighted = between[:, -1].exp()[..., None] * value
    return before[:, -1].exp()[:, None, None] * state + weighted.transpose(1, 2) @ key
