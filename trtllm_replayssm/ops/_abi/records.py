"""What all public headers of the native library share: status codes, the error record, element types, tensor views."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from trtllm_replayssm.errors import ContractError

ABI_VERSION = 6
MAX_RANK = 4
ERROR_CHARS = 508


class Dtype(IntEnum):
    """RSSM_FLOAT32 ... of tensor.h."""

    NONE = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT8_E4M3 = 4
    FLOAT4_E2M1 = 5
    INT32 = 6
    INT64 = 7


class Status(IntEnum):
    """RSSM_OK ... of status.h."""

    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    WORKSPACE_TOO_SMALL = 3
    ABI_MISMATCH = 4
    CUDA_ERROR = 5
    INTERNAL = 6


class ErrorRecord(ctypes.Structure):
    """rssm_error: status and message of the last failing call that was given this record."""

    _fields_ = [("status", ctypes.c_int32), ("message", ctypes.c_char * ERROR_CHARS)]


class Tensor(ctypes.Structure):
    """rssm_tensor: a view of device memory, strides in elements. The default value is an absent tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("stride", ctypes.c_int64 * MAX_RANK),
    ]


def fields(scalars: Mapping[str, Any], *tensors: str) -> list[tuple[str, Any]]:
    """A struct's fields in the order of the headers: numbers (and nested structs) first, then tensor views."""
    return [*scalars.items(), *((name, Tensor) for name in tensors)]


class Args(ctypes.Structure):
    """Base of the args structs: each begins with its own size and the ABI version, filled by `Library`."""

    _fields_ = fields({"struct_size": ctypes.c_uint32, "abi_version": ctypes.c_uint32})


def tensor(data: int, dtype: Dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A view of `data` (device address) with `shape` and `stride` in elements; rank at most 4."""
    if len(shape) > MAX_RANK or len(shape) != len(stride):
        raise ContractError("tensor", "shape", expected=f"rank <= {MAX_RANK} and as many strides", got=(shape, stride))
    view = Tensor(data=data, dtype=int(dtype), rank=len(shape))
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        view.shape[axis] = size
        view.stride[axis] = step
    return view
