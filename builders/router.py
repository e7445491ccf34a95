"""Routing of tokens to experts as TensorRT layers, float32 throughout; the rules of `spec.layers.route`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.builders.network import Network
from trtllm_replayssm.shapes import MoeShape, Router

_NEVER = -1e30  # finite: a masked score must stay an ordinary number


def route(
    net: Network, scores: Any, bias: NDArray[np.float32] | None, shape: MoeShape, name: str
) -> tuple[Any, Any]:
    """Router logits [B, T, E] float32 -> expert ids int32 and weights float32, both [B, T, top_k].

    The bias takes part in the choice and not in the weights; which of two equal scores wins is TensorRT's choice.
    """
    if shape.router is Router.SOFTMAX:
        layer = net.definition.add_softmax(scores)
        layer.axes = 1 << (len(scores.shape) - 1)
        own = net.named(layer, f"{name} scores")
        weights, ids = net.top(own, shape.top_k, f"{name} choice")
    else:
        own = net.activate(scores, "SIGMOID", f"{name} scores")
        choice = own
        if bias is not None:
            constant = net.constant(f"{name} bias", bias, shape=(1, 1, shape.experts))
            choice = net.binary(own, constant, "SUM", f"{name} biased scores")
        _, ids = net.top(_within_groups(net, choice, shape, name), shape.top_k, f"{name} choice")
        gather = net.definition.add_gather_v2(own, ids, net.trt.GatherMode.ELEMENT)
        gather.axis = 2
        weights = net.named(gather, f"{name} weights")
    if shape.norm_topk:
        total = net.binary(
            net.reduce_last(weights, "SUM", f"{name} sum"), net.scalar(1e-20), "SUM", f"{name} positive sum"
        )
        weights = net.binary(weights, total, "DIV", f"{name} normalised weights")
    if shape.scaling != 1.0:
        weights = net.binary(weights, net.scalar(shape.scaling), "PROD", f"{name} scaled weights")
    return ids, weights


def _within_groups(net: Network, choice: Any, shape: MoeShape, name: str) -> Any:
    """Very small scores outside the topk_group expert groups whose two best members score highest."""
    if shape.n_group == 1:
        return choice
    groups, members = shape.n_group, shape.experts // shape.n_group
    grouped = net.reshape(choice, (0, 0, groups, members), f"{name} groups")
    best, _ = net.top(grouped, min(2, members), f"{name} best members")
    score = net.reshape(net.reduce_last(best, "SUM", f"{name} group sum"), (0, 0, groups), f"{name} group scores")
    _, chosen = net.top(score, shape.topk_group, f"{name} chosen groups")
    # [B, T, 1, topk_group] against [1, 1, groups, 1]: which groups are among the chosen
    chosen = net.reshape(chosen, (0, 0, 1, shape.topk_group), f"{name} chosen row")
    count = np.arange(groups, dtype=np.int32).reshape(1, 1, groups, 1)
    numbers = net.constant(f"numbers of {groups} groups", count, shape=count.shape)
    equal = net.cast(net.binary(numbers, chosen, "EQUAL", f"{name} is chosen"), "float32")
    kept = net.cast(net.reduce_last(equal, "MAX", f"{name} kept"), "bool")
    layer = net.definition.add_select(kept, grouped, net.scalar(_NEVER, rank=4))
    return net.reshape(net.named(layer, f"{name} eligible"), (0, 0, shape.experts), f"{name} eligible scores")
