"""The layers around the recurrence as the published models have them: norms, rotary embedding, attention, routing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.shapes import MoeShape, Router
from trtllm_replayssm.spec.ssm import sigmoid, silu

Array = NDArray[np.float64]
Indices = NDArray[np.int64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis."""
    return np.asarray(weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def gated_rms_norm(x: Array, gate: Array, weight: Array, eps: float, *, groups: int, gate_first: bool) -> Array:
    """RMSNorm over contiguous groups with a SiLU gate before (Mamba-2) or after it (GDN); see `graph.Graph`."""
    if gate_first:
        grouped = (x * silu(gate)).reshape(*x.shape[:-1], groups, -1)
        return rms_norm(grouped, np.float64(1.0), eps).reshape(x.shape) * weight
    grouped = x.reshape(*x.shape[:-1], groups, -1)
    return rms_norm(grouped, weight, eps).reshape(x.shape) * silu(gate)


def rope(x: Array, positions: Array, rotary_dim: int, theta: float) -> Array:
    """Rotate the first rotary_dim of x [T, heads, d] by positions [T]; pairs (i, i + rotary_dim / 2)."""
    half = rotary_dim // 2
    angle = positions[:, None, None] * theta ** (-2.0 * np.arange(half) / rotary_dim)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[..., :half], x[..., half:rotary_dim]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:]], axis=-1)


def attention(q: Array, keys: Array, values: Array) -> Array:
    """The last T queries q [T, Hq, d] over keys, values [n, Hkv, d], causal -> [T, Hq, d]."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, repeat, axis=1), np.repeat(values, repeat, axis=1)
    scores = np.einsum("thd,nhd->htn", q, keys) / np.sqrt(q.shape[-1])
    own = np.arange(len(keys) - len(q), len(keys))
    scores = np.where(np.arange(len(keys))[None, None, :] <= own[None, :, None], scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(np.einsum("htn,nhd->thd", scores / scores.sum(-1, keepdims=True), values))


def route(logits: Array, bias: Array | None, shape: MoeShape) -> tuple[Indices, Array]:
    """Router logits [T, experts] -> expert ids and weights [T, top_k]; ties go to the lower expert.

    sigmoid_bias: chosen by score plus bias within the best groups, weighted by the score alone, normalised, scaled.
    softmax: chosen and weighted by the probability, renormalised over the chosen.
    """
    if shape.router is Router.SOFTMAX:
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        choice = scores
    else:
        scores = sigmoid(logits)
        choice = _within_groups(scores if bias is None else scores + bias, shape)
    ids = np.argsort(-choice, axis=-1, kind="stable")[:, : shape.top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if shape.norm_topk:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * shape.scaling


def _within_groups(choice: Array, shape: MoeShape) -> Array:
    """-inf outside the topk_group expert groups whose two best members score highest."""
    if shape.n_group == 1:
        return choice
    grouped = choice.reshape(len(choice), shape.n_group, -1)
    score = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
    best = np.argsort(-score, axis=-1, kind="stable")[:, : shape.topk_group]
    keep = np.zeros_like(score, bool)
    np.put_along_axis(keep, best, True, axis=-1)
    return np.where(np.repeat(keep, grouped.shape[-1], axis=-1), choice, -np.inf)
