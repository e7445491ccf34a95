"""One function per kind of TensorRT layer: reads the layer's settings once and returns what it does to tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

Memory = dict[str, Tensor]
Step = Callable[[Memory], None]
_TYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64,
    "BOOL": torch.bool,
}  # fmt: skip
_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add, "PROD": torch.mul, "SUB": torch.sub, "DIV": torch.div, "GREATER": torch.gt, "LESS": torch.lt,
}  # fmt: skip
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "EXP": torch.exp, "LOG": torch.log, "SQRT": torch.sqrt, "RECIP": torch.reciprocal, "ABS": torch.abs,
    "NEG": torch.neg, "NOT": torch.logical_not,
}  # fmt: skip
_ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {"SIGMOID": torch.sigmoid, "RELU": functional.relu}
_REDUCE: dict[str, Callable[..., Tensor]] = {"AVG": torch.mean}


def step_of(trt: Any, layer: Any, kind: str, attention: dict[str, Any]) -> Step:
    """What the layer does. attention: the first half of an attention layer, kept for the second."""
    inputs = [layer.get_input(i).name if layer.get_input(i) is not None else None for i in range(layer.num_inputs)]
    outputs = [layer.get_output(i).name for i in range(layer.num_outputs)]
    function = _READERS[kind](trt, layer, attention)

    def step(memory: Memory) -> None:
        results = function(*[None if n is None else memory[n] for n in inputs])
        for name, result in zip(outputs, results if isinstance(results, tuple) else (results,), strict=True):
            memory[name] = result

    return step


def _as(trt: Any, layer: Any, name: str) -> Any:
    layer.__class__ = getattr(trt, name)
    return layer


def _cast(trt: Any, layer: Any, _: Any) -> Any:
    kind = _TYPES[layer.get_output(0).dtype.name]
    return lambda x: x.to(kind)


def _identity(trt: Any, layer: Any, _: Any) -> Any:
    return lambda x: x


def _elementwise(trt: Any, layer: Any, _: Any) -> Any:
    return _ELEMENTWISE[_as(trt, layer, "IElementWiseLayer").op.name]


def _unary(trt: Any, layer: Any, _: Any) -> Any:
    return _UNARY[_as(trt, layer, "IUnaryLayer").op.name]


def _activation(trt: Any, layer: Any, _: Any) -> Any:
    return _ACTIVATION[_as(trt, layer, "IActivationLayer").type.name]


def _axes(mask: int) -> list[int]:
    return [axis for axis in range(8) if mask >> axis & 1]


def _reduce(trt: Any, layer: Any, _: Any) -> Any:
    layer = _as(trt, layer, "IReduceLayer")
    function, axes, keep = _REDUCE[layer.op.name], _axes(layer.axes), layer.keep_dims
    return lambda x: function(x, dim=axes, keepdim=keep)


def _slice(trt: Any, layer: Any, _: Any) -> Any:
    layer = _as(trt, layer, "ISliceLayer")
    (axis,), (start,), (width,), (stride,) = (tuple(v) for v in (layer.axes, layer.start, layer.shape, layer.stride))
    assert stride == 1
    return lambda x: x.narrow(axis, start, width)


def _concatenation(trt: Any, layer: Any, _: Any) -> Any:
    axis = _as(trt, layer, "IConcatenationLayer").axis
    return lambda *parts: torch.cat(parts, dim=axis)


def _shuffle(trt: Any, layer: Any, _: Any) -> Any:
    layer = _as(trt, layer, "IShuffleLayer")
    first, second = tuple(layer.first_transpose), tuple(layer.second_transpose)
    dims = tuple(layer.reshape_dims or ())  # none when no reshape was set

    def shuffle(x: Tensor) -> Tensor:
        x = x.permute(first[: x.dim()])
        if dims:
            x = x.reshape([x.shape[i] if d == 0 else d for i, d in enumerate(dims)])
        return x.permute(second[: x.dim()])

    return shuffle


def _matmul(trt: Any, layer: Any, _: Any) -> Any:
    layer = _as(trt, layer, "IMatrixMultiplyLayer")
    assert (layer.op0.name, layer.op1.name) == ("NONE", "TRANSPOSE")
    return lambda a, b: functional.linear(a, b[0])


def _gather(trt: Any, layer: Any, _: Any) -> Any:
    layer = _as(trt, layer, "IGatherLayer")
    axis, shared = layer.axis, layer.num_elementwise_dims
    assert layer.mode.name == "DEFAULT" and (axis, shared) in ((0, 0), (1, 1))
    if shared == 0:
        return lambda x, index: functional.embedding(index.long(), x)
    return lambda x, index: x[torch.arange(len(x))[:, None], index.long()]


def _select(trt: Any, layer: Any, _: Any) -> Any:
    return torch.where


def _rotary(trt: Any, layer: Any, _: Any) -> Any:
    layer = _as(trt, layer, "IRotaryEmbeddingLayer")
    size, interleaved = layer.rotary_embedding_dim, layer.interleaved
    assert not interleaved

    def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
        c, s = (table[positions.long()][:, None] for table in (cos, sin))  # [B, 1, T, size / 2]
        first, second = x[..., : size // 2], x[..., size // 2 : size]
        return torch.cat([first * c - second * s, first * s + second * c, x[..., size:]], dim=-1)

    return rotary


def _cache_update(trt: Any, layer: Any, _: Any) -> Any:
    """In place, as the engine does it: the output is the memory of the cache."""

    def update(cache: Tensor, new: Tensor, position: Tensor) -> Tensor:
        count = new.shape[2]
        for row, start in enumerate(position.tolist()):
            assert start >= 0 and start + count <= cache.shape[2], "a write outside the cache"
            cache[row, :, start : start + count] = new[row]
        return cache

    return update


def _attention_input(trt: Any, layer: Any, attention: dict[str, Any]) -> Any:
    """The first half carries the tensors, the second half the result; no scale, an explicit mask."""

    def remember(*tensors: Tensor) -> Any:
        attention["tensors"] = tensors
        return tuple(tensors[0] for _ in range(layer.num_outputs)) if layer.num_outputs > 1 else tensors[0]

    return remember


def _attention_output(trt: Any, layer: Any, attention: dict[str, Any]) -> Any:
    def attend(*_: Tensor) -> Tensor:
        q, k, v, mask = attention["tensors"][:4]
        assert mask.dtype is torch.bool
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)

    return attend


def _quantize(trt: Any, layer: Any, _: Any) -> Any:
    """To FP8, kept as the values before their scale."""
    assert layer.get_output(0).dtype.name == "FP8"
    return lambda x, scale: (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _dequantize(trt: Any, layer: Any, _: Any) -> Any:
    axis = _as(trt, layer, "IDequantizeLayer").axis
    kind = _TYPES[layer.get_output(0).dtype.name]

    def dequantize(x: Tensor, scale: Tensor) -> Tensor:
        if scale.dim() == 1:
            scale = scale.reshape([-1 if i == axis else 1 for i in range(x.dim())])
        elif scale.dim() == x.dim() and scale.shape[-1] != x.shape[-1]:
            scale = scale.repeat_interleave(x.shape[-1] // scale.shape[-1], dim=-1)
        return (x * scale).to(kind)

    return dequantize


def _dynamic_quantize(trt: Any, layer: Any, _: Any) -> Any:
    """To FP4 with an E4M3 scale per block: scale = amax / 6 / factor, values to the nearest code."""
    layer = _as(trt, layer, "IDynamicQuantizeLayer")
    block = layer.block_size

    def quantize(x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.float().unflatten(-1, (-1, block))
        scales = (blocks.abs().amax(-1) / 6.0 / factor).clamp(max=448.0).to(torch.float8_e4m3fn).float()
        divisor = (scales * factor)[..., None]
        quotient = torch.where(divisor > 0, blocks / divisor, torch.zeros(())).clamp(-6, 6)
        rounded = quotient.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        codes = torch.from_numpy(rounded)
        return codes.flatten(-2), scales

    return quantize


_READERS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "CAST": _cast, "IDENTITY": _identity,
    "ELEMENTWISE": _elementwise, "UNARY": _unary, "ACTIVATION": _activation, "REDUCE": _reduce,
    "SLICE": _slice, "CONCATENATION": _concatenation, "SHUFFLE": _shuffle,
    "MATRIX_MULTIPLY": _matmul, "GATHER": _gather, "SELECT": _select, "ROTARY_EMBEDDING": _rotary,
    "KV_CACHE_UPDATE": _cache_update, "ATTENTION_INPUT": _attention_input, "ATTENTION_OUTPUT": _attention_output,
    "QUANTIZE": _quantize, "DEQUANTIZE": _dequantize, "DYNAMIC_QUANTIZE": _dynamic_quantize,
}  # fmt: skip
