"""Norms, activations, rotation and attention of a forward pass by the CUDA kernels, which join neighbouring operations.

The vocabulary names operations one by one; a kernel does several of them in one launch:
    linear, add, rms_norm                 a residual sum and its norm, with the sum of a product's parts or over ranks
    silu or sigmoid, mul                  an activation and its product
    rms_norm and rope of heads, attention head norms, rotation and the write into the KV slots
The first of a group returns a tensor that is not computed yet, and the last runs the launch.
HAZARD: such a tensor may go nowhere but into the operations of its group, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from trtllm_replayssm.ops import native_layers
from trtllm_replayssm.ops.native_layers import Function, HeadNorms, Rotation
from trtllm_replayssm.ops.native_ranks import Inboxes
from trtllm_replayssm.runtime.pools.kv_pool import KvLayer
from trtllm_replayssm.runtime.session.decode_attention import attend_caches
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext


@dataclass(frozen=True)
class _Addend:
    """Of a sum over ranks."""

    x: Tensor


@dataclass(frozen=True)
class _Parts:
    """x [P, B, T, D] float32 whose sum over P is the tensor."""

    x: Tensor


@dataclass(frozen=True)
class _Sum:
    """a + b; over_ranks: of every rank's a; in_parts: a has them."""

    a: Tensor
    b: Tensor
    over_ranks: bool = False
    in_parts: bool = False


@dataclass(frozen=True)
class _Activation:
    function: Function
    x: Tensor


@dataclass(frozen=True)
class _Heads:
    """x [B, T, heads, D] before its norm and its rotation."""

    x: Tensor
    weight: Tensor | None = None
    eps: float = 0.0
    unit_offset: bool = False
    rotation: Rotation | None = None


_Waiting = TypeVar("_Waiting", _Addend, _Parts, _Sum, _Activation, _Heads)


class NativeLayers:
    """The operations of one forward pass; tensors are [B, T, ...] on CUDA, bfloat16 or float16."""

    def __init__(self, context: StepContext, inboxes: Inboxes | None = None) -> None:
        """inboxes: of several ranks, for rows of the model's hidden size."""
        self._ctx = context
        self._inboxes = inboxes
        self._waiting: dict[int, tuple[Tensor, object]] = {}

    @staticmethod
    def serves(head_size: int, rotary_dim: int) -> bool:
        """Whether the kernels take attention heads of `head_size` channels of which `rotary_dim` turn."""
        whole = head_size % native_layers.HEAD_PIECE == 0 and rotary_dim % native_layers.ROTATION_PIECE == 0
        return whole and head_size <= native_layers.MAX_HEAD

    def over_ranks(self, x: Tensor) -> Tensor | None:
        """The sum of every rank's x, computed by the `rms_norm` of its `add`; None where no kernel serves it."""
        if self._inboxes is None or not self._inboxes.serves(x):
            return None
        return self._later(x.view_as(x), _Addend(x))

    def in_parts(self, parts: Tensor) -> Tensor:
        """The sum over P of parts [P, B, T, D] float32, computed by the `rms_norm` of its `add`."""
        return self._later(parts[0], _Parts(parts))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, computed by the `rms_norm` of it."""
        for one, other in ((a, b), (b, a)):
            parts = self._take(one, _Parts)
            if parts is not None:
                return self._later(torch.empty_like(other), _Sum(parts.x, other, in_parts=True))
            addend = self._take(one, _Addend)
            if addend is not None:
                return self._later(torch.empty_like(other), _Sum(addend.x, other, over_ranks=True))
        return self._later(torch.empty_like(a), _Sum(a, b))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
        """Of rows [B, T, D], with the sum that x waits for."""
        waiting = self._take(x, _Sum)
        if waiting is None:
            return native_layers.rms_norm(x, weight, eps, unit_offset=unit_offset)
        a, b = waiting.a, waiting.b
        if waiting.over_ranks and self._inboxes is not None:
            return self._inboxes.add_rms_norm(a, b, x, weight, eps, unit_offset=unit_offset)
        norm = native_layers.add_parts_rms_norm if waiting.in_parts else native_layers.add_rms_norm
        return norm(a, b, x, weight, eps, unit_offset=unit_offset)

    def activation(self, function: Function, x: Tensor) -> Tensor:
        """function(x), computed by the `mul` of it."""
        heads = self._take(x, _Heads)
        return self._later(x.view_as(x), _Activation(function, x if heads is None else heads.x))

    def merge_heads(self, x: Tensor) -> Tensor:
        """[B, T, G, D] -> [B, T, G * D]; heads with others between them may only go into an activation that waits."""
        return x.flatten(-2) if x.is_contiguous() else self._later(x.view_as(x), _Heads(x))

    def relu2(self, x: Tensor) -> Tensor:
        """max(x, 0) squared, at once."""
        return native_layers.activation(Function.RELU2, x)

    def opened(self, gate: Tensor | None, up: Tensor, opening: Tensor) -> Tensor:
        """SiLU(gate) up, or max(up, 0) squared, of tokens [n, C], times sigmoid(opening [n] float32), at once."""
        if gate is None:
            return native_layers.activation(Function.RELU2, up, None, opening)
        return native_layers.activation(Function.SILU, gate, up, opening)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a b, one of which may be an activation that waits."""
        for opening, factor in ((a, b), (b, a)):
            waiting = self._take(opening, _Activation)
            if waiting is not None:
                return native_layers.activation(waiting.function, waiting.x, factor)
        return a * b

    def head_norm(self, x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
        """RMSNorm of heads [B, T, heads, D], computed by `attention`."""
        return self._later(x.view_as(x), _Heads(x, weight, eps, unit_offset))

    def rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotation of heads, normalised or not, computed by `attention`."""
        heads = self._take(x, _Heads) or _Heads(x)
        return self._later(heads.x.view_as(heads.x), replace(heads, rotation=rotation))

    def attention(self, kv: KvLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, Hq, D], k, v [B, T, Hkv, D] -> [B, T, Hq * D]; see `decode_attention`."""
        queries, keys = self._take(q, _Heads) or _Heads(q), self._take(k, _Heads) or _Heads(k)
        assert queries.rotation is keys.rotation and queries.eps == keys.eps, "queries and keys are treated alike"
        norms = None
        if queries.weight is not None and keys.weight is not None:
            norms = HeadNorms(queries.weight, keys.weight, queries.eps, queries.unit_offset)
        rows, caches = self._ctx.int32_rows, {"keys": kv.keys, "values": kv.values}
        turned = native_layers.attention_inputs(
            rows, queries.x, keys.x, v, caches, norms=norms, rotation=queries.rotation
        )
        if self._ctx.phase is not Phase.PREFILL:
            return native_layers.attention(rows, turned, caches).flatten(-2)
        return attend_caches(turned, kv, self._ctx.on_host)

    def _later(self, result: Tensor, waiting: _Addend | _Parts | _Sum | _Activation | _Heads) -> Tensor:
        self._waiting[id(result)] = (result, waiting)  # the result is kept: ids of dead tensors come back
        return result

    def _take(self, result: Tensor, kind: type[_Waiting]) -> _Waiting | None:
        _, waiting = self._waiting.get(id(result), (None, None))
        if not isinstance(waiting, kind):
            return None
        del self._waiting[id(result)]
        return waiting
