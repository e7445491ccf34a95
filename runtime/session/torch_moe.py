"""Routing and experts in torch: only the chosen experts of existing tokens are touched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.shapes import MoeShape, Router


def route(logits: Tensor, bias: Tensor | None, shape: MoeShape) -> tuple[Tensor, Tensor]:
    """Router logits [n, experts] float32 -> expert ids and weights [n, top_k]; rules as `spec.layers.route`."""
    if shape.router is Router.SOFTMAX:
        scores = logits.softmax(-1)
        choice = scores
    else:
        scores = logits.sigmoid()
        choice = _within_groups(scores if bias is None else scores + bias, shape)
    # a stable sort, not topk: ties go to the lower expert on every device
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : shape.top_k]
    weights = scores.gather(-1, ids)
    if shape.norm_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * shape.scaling


def routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, shape: MoeShape, expert: Callable[[str, int], Tensor]
) -> Tensor:
    """Weighted sum of the chosen experts: x [n, width], ids and weights [n, top_k]; expert(projection, e) -> matrix.

    An id of -1 is no expert.
    """
    out = torch.zeros(x.shape, device=x.device)
    for e in ids[ids >= 0].unique().tolist():
        token, choice = torch.nonzero(ids == e, as_tuple=True)
        inner = functional.linear(x[token], expert("up_proj", e))
        if shape.gated:
            inner = functional.silu(functional.linear(x[token], expert("gate_proj", e))) * inner
        else:
            inner = functional.relu(inner).square()
        answer = functional.linear(inner, expert("down_proj", e)).float()
        out.index_add_(0, token, weights[token, choice, None] * answer)
    return out.to(x.dtype)


def _within_groups(choice: Tensor, shape: MoeShape) -> Tensor:
    """-inf outside the topk_group expert groups whose two best members score highest."""
    if shape.n_group == 1:
        return choice
    grouped = choice.unflatten(-1, (shape.n_group, -1))
    score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    best = score.sort(dim=-1, descending=True, stable=True).indices[:, : shape.topk_group]
    keep = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True)
    return torch.where(keep[..., None], grouped, float("-inf")).flatten(-2)
