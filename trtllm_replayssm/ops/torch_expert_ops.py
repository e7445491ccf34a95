"""Routing, routed experts and packed products as torch custom operations `replayssm::route`, `::experts` and
`::packed_linear`. Names and meaning of the arguments are those of plugins/include/replayssm/experts.h and route.h; the
workspace is torch's and lives until the stream is past the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.library import installed_library
from trtllm_replayssm.ops.views import aligned, current_stream, view

_ROUTE = (
    "(int router, int groups, int topk_group, int norm_topk, float scaling, int top_k, Tensor logits, Tensor? bias, "
    "Tensor? slot, Tensor? num_tokens) -> (Tensor, Tensor)"
)
_EXPERTS = (
    "(int inner, int parts, Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor? up_scale, Tensor up_factor, "
    "Tensor down, Tensor? down_scale, Tensor down_factor) -> Tensor"
)
_LINEAR = "(int rows, Tensor x, Tensor data, Tensor? block_scale, Tensor factor) -> Tensor"


def packed_weights(
    rows: int, columns: int, parts: int, data: Tensor, block_scale: Tensor | None, factor: Tensor
) -> _abi.PackedWeights:
    """The struct of a stack: data [E, tiles, blocks, bytes of NVFP4 as uint8 | E4M3 | bfloat16]."""
    return _abi.PackedWeights(
        rows=rows, columns=columns, parts=parts, data=view(data), block_scale=view(block_scale), factor=view(factor)
    )


def _route(
    router: int, groups: int, topk_group: int, norm_topk: int, scaling: float, top_k: int, logits: Tensor,
    bias: Tensor | None, slot: Tensor | None, num_tokens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ids, weights = _route_outputs(logits, top_k)
    args = _abi.RouteArgs(
        flags=_abi.ROUTE_PROGRAMMATIC_LAUNCH, router=router, groups=groups, topk_group=topk_group, norm_topk=norm_topk,
        scaling=scaling, logits=view(logits), bias=view(bias), slot=view(slot), num_tokens=view(num_tokens),
        ids=view(ids), weights=view(weights),
    )  # fmt: skip
    installed_library().route(args, current_stream(logits))
    return ids, weights


def _route_outputs(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0] * logits.shape[1], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


def _experts(
    inner: int, parts: int, x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, up_scale: Tensor | None,
    up_factor: Tensor, down: Tensor, down_scale: Tensor | None, down_factor: Tensor,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, library = aligned(x), installed_library()
    args = _abi.ExpertsArgs(
        flags=_abi.EXPERTS_PROGRAMMATIC_LAUNCH,
        up=packed_weights(inner, x.shape[1], parts, up, up_scale, up_factor),
        down=packed_weights(x.shape[1], inner, 1, down, down_scale, down_factor),
        x=view(x), ids=view(ids), weights=view(weights), out=view(out),
    )  # fmt: skip
    size = library.experts_workspace(args)
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    library.experts(args, workspace.data_ptr(), size, current_stream(x))
    return out


def _linear(rows: int, x: Tensor, data: Tensor, block_scale: Tensor | None, factor: Tensor) -> Tensor:
    out = x.new_empty((x.shape[0], rows))
    x = aligned(x)
    weight = packed_weights(rows, x.shape[1], 1, data, block_scale, factor)
    args = _abi.PackedLinearArgs(
        flags=_abi.EXPERTS_PROGRAMMATIC_LAUNCH, weight=weight, x=view(x), out=view(out)
    )  # fmt: skip
    installed_library().packed_linear(args, current_stream(x))
    return out


def _register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    def refuse(*values: Any) -> Any:
        devices = sorted({v.device.type for v in values if isinstance(v, Tensor)})
        raise ContractError(f"replayssm::{name}", "device", expected="CUDA tensors", got=", ".join(devices))

    operation = torch.library.custom_op(
        f"replayssm::{name}", run, mutates_args=(), schema=schema, device_types="cuda"
    )  # fmt: skip
    operation.register_kernel("cpu", refuse)
    operation.register_fake(fake)


_register("route", _ROUTE, _route, lambda *values: _route_outputs(values[6], values[5]))
_register(
    "experts", _EXPERTS, _experts, lambda *values: torch.empty_like(values[2], memory_format=torch.contiguous_format)
)
_register("packed_linear", _LINEAR, _linear, lambda rows, x, *_: x.new_empty((x.shape[0], rows)))
