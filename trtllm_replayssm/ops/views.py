"""Torch tensors as views of the native ABI. Nothing is copied but inputs whose addresses the kernels cannot take."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops import _abi

ALIGNMENT = 16  # bytes: what the kernels' wide copies need of addresses and strides

_CODES = {
    torch.float32: _abi.Dtype.FLOAT32,
    torch.float16: _abi.Dtype.FLOAT16,
    torch.bfloat16: _abi.Dtype.BFLOAT16,
    torch.float8_e4m3fn: _abi.Dtype.FLOAT8_E4M3,
    torch.int32: _abi.Dtype.INT32,
    torch.int64: _abi.Dtype.INT64,
}


def view(tensor: Tensor | None) -> _abi.Tensor:
    """A view; None is the absent tensor. uint8 [..., n] holds pairs of E2M1 codes and becomes float4 [..., 2 n]."""
    if tensor is None:
        return _abi.Tensor()
    if tensor.dtype is torch.uint8:
        shape = [*tensor.shape[:-1], 2 * tensor.shape[-1]]
        return _abi.tensor(
            tensor.data_ptr(),
            _abi.Dtype.FLOAT4_E2M1,
            shape,
            [*(2 * s for s in tensor.stride()[:-1]), tensor.stride(-1)],
        )
    if tensor.dtype not in _CODES:
        raise ContractError("view", "dtype", expected=", ".join(str(d) for d in _CODES), got=tensor.dtype)
    return _abi.tensor(tensor.data_ptr(), _CODES[tensor.dtype], tensor.shape, tensor.stride())


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself when address and rows are whole 16 bytes and the last axis is contiguous, else a copy."""
    strides = [s * tensor.element_size() for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    odd = tensor.data_ptr() % ALIGNMENT or any(s % ALIGNMENT for s in strides) or tensor.stride(-1) != 1
    return tensor.clone(memory_format=torch.contiguous_format) if odd else tensor


def channels_last(tensor: Tensor) -> Tensor:
    """The tensor itself when its last axis is contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def current_stream(tensor: Tensor) -> int:
    """The cudaStream_t that torch uses on the tensor's device."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
