"""Routing, routed experts and packed products as torch custom operations `replayssm::route`, `::experts` and
`::packed_linear`. Names and meaning of the arguments are those of plugins/include/replayssm/experts.h and route.h; the
workspace is torch's and lives until the stream is past the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import library as torch_library

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.native_library import installed_library
from trtllm_replayssm.ops.views import aligned, current_stream, view

_EXPERT_INPUTS = ("x", "ids", "weights", "up", "up_scale", "up_factor", "down", "down_scale", "down_factor")
_NULLABLE = ("bias", "slot", "num_tokens", "up_scale", "down_scale", "block_scale")


@dataclass(frozen=True)
class _Operation:
    """Arguments in the schema's order: numbers (name, type), then tensors; outputs: how many tensors it returns."""

    name: str
    numbers: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]
    outputs: int = 1

    @property
    def schema(self) -> str:
        parts = [f"{kind} {name}" for name, kind in self.numbers]
        parts += [f"Tensor{'?' * (name in _NULLABLE)} {name}" for name in self.inputs]
        return f"({', '.join(parts)}) -> ({', '.join(['Tensor'] * self.outputs)})"

    def named(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return dict(zip((*(name for name, _ in self.numbers), *self.inputs), values, strict=True))


_ROUTE = _Operation(
    "route",
    (*((name, "int") for name in ("router", "groups", "topk_group", "norm_topk", "top_k")), ("scaling", "float")),
    ("logits", "bias", "slot", "num_tokens"),
    outputs=2,
)
_EXPERTS = _Operation("experts", (("inner", "int"),), _EXPERT_INPUTS)
_LINEAR = _Operation("packed_linear", (("rows", "int"),), ("x", "data", "block_scale", "factor"))


def _packed(rows: int, columns: int, data: Tensor, block_scale: Tensor | None, factor: Tensor) -> _abi.PackedWeights:
    """The struct of a stack: data [E, groups, blocks, ...] uint8 (NVFP4), E4M3 or bfloat16; factor [E, parts, ...]."""
    parts = factor.shape[1]
    return _abi.PackedWeights(
        rows=rows, columns=columns, parts=parts, data=view(data), block_scale=view(block_scale), factor=view(factor)
    )


def _route(*values: Any) -> tuple[Tensor, Tensor]:
    given = _ROUTE.named(values)
    ids, weights = _route_outputs(*values)
    tensors = {name: view(given.pop(name)) for name in _ROUTE.inputs}
    del given["top_k"]
    args = _abi.RouteArgs(
        flags=_abi.ROUTE_PROGRAMMATIC_LAUNCH, **given, **tensors, ids=view(ids), weights=view(weights)
    )  # fmt: skip
    installed_library().route(args, current_stream(ids))
    return ids, weights


def _route_outputs(*values: Any) -> tuple[Tensor, Tensor]:
    given = _ROUTE.named(values)
    logits = given["logits"]
    shape = (logits.shape[0] * logits.shape[1], given["top_k"])
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


def _experts(*values: Any) -> Tensor:
    given = _EXPERTS.named(values)
    out, library = _experts_output(*values), installed_library()
    x, inner = aligned(given["x"]), given["inner"]
    width = x.shape[1]
    args = _abi.ExpertsArgs(
        flags=_abi.EXPERTS_PROGRAMMATIC_LAUNCH,
        up=_packed(inner, width, given["up"], given["up_scale"], given["up_factor"]),
        down=_packed(width, inner, given["down"], given["down_scale"], given["down_factor"]),
        x=view(x), ids=view(given["ids"]), weights=view(given["weights"]), out=view(out),
    )  # fmt: skip
    size = library.experts_workspace(args)
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    library.experts(args, workspace.data_ptr(), size, current_stream(x))
    return out


def _experts_output(*values: Any) -> Tensor:
    return torch.empty_like(_EXPERTS.named(values)["x"], memory_format=torch.contiguous_format)


def _linear(rows: int, x: Tensor, data: Tensor, block_scale: Tensor | None, factor: Tensor) -> Tensor:
    out, x = _linear_output(rows, x), aligned(x)
    weight = _packed(rows, x.shape[1], data, block_scale, factor)
    args = _abi.PackedLinearArgs(
        flags=_abi.EXPERTS_PROGRAMMATIC_LAUNCH, weight=weight, x=view(x), out=view(out)
    )  # fmt: skip
    installed_library().packed_linear(args, current_stream(x))
    return out


def _linear_output(rows: int, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], rows))


def _register(operation: _Operation, run: Callable[..., Any], outputs: Callable[..., Any]) -> None:
    name = f"replayssm::{operation.name}"

    def refuse(*values: Any) -> Any:
        devices = sorted({v.device.type for v in values if isinstance(v, Tensor)})
        raise ContractError(name, "device", expected="CUDA tensors", got=", ".join(devices))

    custom = torch_library.custom_op(name, run, mutates_args=(), schema=operation.schema, device_types="cuda")
    custom.register_kernel("cpu", refuse)
    custom.register_fake(outputs)


_register(_ROUTE, _route, _route_outputs)
_register(_EXPERTS, _experts, _experts_output)
_register(_LINEAR, _linear, _linear_output)
