"""Routing and routed experts by the native kernels, on CUDA tensors of bfloat16. Nothing here waits for the device.

A stack of packed matrices is made once, when a model is loaded; `weights/packing.py` has the order of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.ops import _abi, torch_expert_ops
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.shapes import MoeShape, Router

__all__ = ["ExpertStacks", "PackedStack", "experts", "packed_linear", "route", "torch_expert_ops"]

CHANNEL_PIECE = 8  # channels of experts come in whole pieces of as many
MAX_EXPERTS, MAX_CHOICES, MAX_GROUPS = 1024, 32, 32
_ROUTERS = {Router.SOFTMAX: _abi.RouterKind.SOFTMAX, Router.SIGMOID_BIAS: _abi.RouterKind.SIGMOID}


@dataclass(frozen=True)
class PackedStack:
    """Matrices [rows, columns] of E experts, `parts` of each (gate and up: 2) packed as one.

    data: [E, groups, blocks, ...] uint8 (NVFP4), E4M3 or bfloat16; block_scale: [E, groups, blocks, 1024] E4M3 or None;
    factor: [E, parts, 1 | rows] float32.
    """

    rows: int
    columns: int
    parts: int
    data: Tensor
    block_scale: Tensor | None
    factor: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        parts = (self.data, self.block_scale, self.factor)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)


@dataclass(frozen=True)
class ExpertStacks:
    """What the experts of a layer multiply with: up (with gate) and down."""

    up: PackedStack
    down: PackedStack


def serves(shape: MoeShape, width: int, activation: torch.dtype) -> bool:
    """Whether the kernels take experts of this shape over `width` channels of the activation type."""
    whole = width % CHANNEL_PIECE == 0 and shape.intermediate % CHANNEL_PIECE == 0
    small = shape.experts <= MAX_EXPERTS and shape.top_k <= MAX_CHOICES and shape.n_group <= MAX_GROUPS
    return whole and small and activation is torch.bfloat16


def route(logits: Tensor, bias: Tensor | None, shape: MoeShape, rows: StepRows) -> tuple[Tensor, Tensor]:
    """`session.torch_moe.route` for logits [B, T, experts] float32; ids [B T, k] int32 are -1 for absent tokens."""
    softmax = shape.router is Router.SOFTMAX
    ids, weights = torch.ops.replayssm.route(
        router=int(_ROUTERS[shape.router]), groups=1 if softmax else shape.n_group,
        topk_group=1 if softmax else shape.topk_group, norm_topk=int(shape.norm_topk), top_k=shape.top_k,
        scaling=shape.scaling, logits=logits, bias=None if softmax else bias, slot=rows.slot.int(),
        num_tokens=rows.num_tokens.int(),
    )  # fmt: skip
    return ids, weights


def experts(x: Tensor, ids: Tensor, weights: Tensor, stacks: ExpertStacks) -> Tensor:
    """x [n, width] bfloat16, ids and weights [n, k] -> the weighted sum [n, width]; ids < 0 give no work."""
    up, down = stacks.up, stacks.down
    out: Tensor = torch.ops.replayssm.experts(
        inner=up.rows, x=x, ids=ids, weights=weights, up=up.data, up_scale=up.block_scale,
        up_factor=up.factor, down=down.data, down_scale=down.block_scale, down_factor=down.factor,
    )  # fmt: skip
    return out


def packed_linear(x: Tensor, weight: PackedStack) -> Tensor:
    """x [n, columns] bfloat16 times a stack of one matrix -> [n, rows]."""
    out: Tensor = torch.ops.replayssm.packed_linear(weight.rows, x, weight.data, weight.block_scale, weight.factor)
    return out
