"""Tensors of made-up memory for calls that are refused before anything is read."""

from __future__ import annotations

from typing import Any

from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops._abi import Dtype

NULL = _abi.Tensor()


def view(dtype: Dtype, *shape: int, stride: tuple[int, ...] | None = None, data: int = 1 << 20) -> _abi.Tensor:
    """A view of made-up memory, contiguous unless strides are given."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return _abi.tensor(data, dtype, shape, stride or tuple(reversed(steps)))


def replaced(args: Any, path: str, value: Any) -> Any:
    *outer, name = path.split(".")
    target = args
    for field in outer:
        target = getattr(target, field)
    assert hasattr(target, name)
    setattr(target, name, value)
    return args
