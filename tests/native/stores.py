"""Checkpoint copies of one layer on the device: poisoned, filled by the reference encoder, seen through the ABI."""

from __future__ import annotations

from typing import Any

import torch

from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.shapes import SsmShape

_CODES = {
    torch.float32: _abi.Dtype.FLOAT32,
    torch.float16: _abi.Dtype.FLOAT16,
    torch.float8_e4m3fn: _abi.Dtype.FLOAT8_E4M3,
}


def poisoned_store(fmt: StateFormat, shape: SsmShape, slots: int) -> StateStore:
    """Every byte 0x7f: NaN in the float formats, the largest code elsewhere."""
    store = StateStore.allocate(fmt, shape, slots, torch.device("cuda"))
    for tensor in store.tensors():
        tensor.view(torch.uint8).fill_(0x7F)
    return store


def store_views(name: str, store: StateStore) -> dict[str, _abi.Tensor]:
    """The args fields of a copy: <name>, <name>_scale and, where there is one, <name>_head_scale."""
    views = {name: _view(store.data)}
    if store.block_scale is not None:
        views[f"{name}_scale"] = _view(store.block_scale)
    if store.head_scale is not None:
        views[f"{name}_head_scale"] = _view(store.head_scale)
    return views


def same_bits(a: StateStore, b: StateStore) -> bool:
    """Whether both hold the same bytes."""
    return all(
        torch.equal(x.cpu().view(torch.uint8), y.cpu().view(torch.uint8))
        for x, y in zip(a.tensors(), b.tensors(), strict=True)
    )


def _view(tensor: Any) -> _abi.Tensor:
    if tensor.dtype is torch.uint8:  # two E2M1 codes a byte; shapes and strides count codes
        shape, stride = list(tensor.shape), [2 * step for step in tensor.stride()]
        shape[-1], stride[-1] = 2 * shape[-1], 1
        return _abi.tensor(tensor.data_ptr(), _abi.Dtype.FLOAT4_E2M1, shape, stride)
    return _abi.tensor(tensor.data_ptr(), _CODES[tensor.dtype], tensor.shape, tensor.stride())
