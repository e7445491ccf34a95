"""The two recurrences, one token at a time, as the models define them (paper, Eq. 1-3). State S: [H, P, N] float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.shapes import L2_EPS, SsmShape

Array = NDArray[np.float64]


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), stable."""
    return np.logaddexp(0.0, x)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), stable for either sign."""
    return np.exp(-np.logaddexp(0.0, -x))


def to_heads(shape: SsmShape, grouped: Array) -> Array:
    """[..., G, N] -> [..., H, N]: consecutive value heads share a key head (repeat-interleave)."""
    return np.repeat(grouped, shape.heads_per_group, axis=-2)


def l2_norm_factor(x: Array) -> Array:
    """1 / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return np.asarray(1.0 / np.sqrt((x * x).sum(-1) + L2_EPS))


def mamba2_step(
    shape: SsmShape, state: Array, x: Array, k: Array, q: Array, dt: Array, a: Array
) -> tuple[Array, Array]:
    """One token: x [H, P], k and q [G, N], dt [H] after softplus, a = -exp(A_log) [H] -> (o [H, P], new state).

    S <- exp(dt a) S + (dt x) k^T, o = S q. The D skip is added by the caller.
    """
    keys, queries = to_heads(shape, k), to_heads(shape, q)
    state = np.exp(dt * a)[:, None, None] * state + (dt[:, None] * x)[:, :, None] * keys[:, None, :]
    return np.einsum("hpn,hn->hp", state, queries), state


def gdn_step(shape: SsmShape, state: Array, k: Array, q: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """One token: raw k, q [G, N], v [H, P], log-decay g [H], beta [H] -> (o [H, P], new state).

    The decay is applied before the state is read for the delta: u = beta (v - alpha S k), S <- alpha S + u k^T.
    """
    keys = to_heads(shape, k * l2_norm_factor(k)[:, None])
    queries = to_heads(shape, q * l2_norm_factor(q)[:, None] / np.sqrt(shape.state_dim))
    decayed = np.exp(g)[:, None, None] * state
    u = beta[:, None] * (v - np.einsum("hpn,hn->hp", decayed, keys))
    state = decayed + u[:, :, None] * keys[:, None, :]
    return np.einsum("hpn,hn->hp", state, queries), state
