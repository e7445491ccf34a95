"""One checkpoint copy of one layer for all slots, in any state format: allocate, load, store.

The encodings are the contract's (`spec.formats`): bytes here mean exactly what the specification's numbers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm.dtypes import E2M1_VALUES, FP4_BLOCK, FP8_BLOCK, Rounding, StateFormat, num_blocks
from trtllm_replayssm.errors import ContractError, UnsupportedError
from trtllm_replayssm.ops.reference.encode import Encoded, encode
from trtllm_replayssm.shapes import SsmShape

_ELEMENT_TYPES = {
    StateFormat.FLOAT32: torch.float32,
    StateFormat.FLOAT16: torch.float16,
    StateFormat.FP8: torch.float8_e4m3fn,
    StateFormat.NVFP4: torch.uint8,
}


@dataclass
class StateStore:
    """States of S slots.

    data: [S, H, P, N] float32 | float16 | float8_e4m3fn, or [S, H, P, N / 2] uint8 (two E2M1 codes, low nibble first).
    block_scale: [S, H, P, N / 128] float32 (FP8) or [S, H, P, N / 16] float8_e4m3fn (NVFP4).
    head_scale: [S, H] float32 (NVFP4).
    """

    format: StateFormat
    data: Tensor
    block_scale: Tensor | None
    head_scale: Tensor | None

    @staticmethod
    def allocate(fmt: StateFormat, shape: SsmShape, slots: int, device: torch.device) -> StateStore:
        """Zero states for `slots` slots. Raises UnsupportedError for NVFP4 unless d_k is a multiple of 16."""
        if fmt is StateFormat.NVFP4 and shape.state_dim % FP4_BLOCK:
            raise UnsupportedError(
                "allocate states", "state_dim", expected=f"a multiple of {FP4_BLOCK} for nvfp4", got=shape.state_dim,
                hint="Use fp8 or float16",
            )  # fmt: skip
        heads, head_dim, state_dim = shape.heads, shape.head_dim, shape.state_dim
        width = state_dim // 2 if fmt is StateFormat.NVFP4 else state_dim
        data = torch.zeros((slots, heads, head_dim, width), dtype=_ELEMENT_TYPES[fmt], device=device)
        block_scale = head_scale = None
        if fmt is StateFormat.FP8:
            block_scale = torch.ones((slots, heads, head_dim, num_blocks(state_dim, FP8_BLOCK)), device=device)
        elif fmt is StateFormat.NVFP4:
            blocks = num_blocks(state_dim, FP4_BLOCK)
            block_scale = torch.ones((slots, heads, head_dim, blocks), device=device).to(torch.float8_e4m3fn)
            head_scale = torch.ones((slots, heads), device=device)
        return StateStore(fmt, data, block_scale, head_scale)

    def tensors(self) -> list[Tensor]:
        """The tensors that hold it, slot axis first."""
        return [t for t in (self.data, self.block_scale, self.head_scale) if t is not None]

    def clear(self, slot: int) -> None:
        """Zero one slot's state."""
        _bytes_of(self.data)[slot] = 0
        if self.block_scale is not None:
            self.block_scale[slot].copy_(torch.ones(self.block_scale.shape[1:]))
        if self.head_scale is not None:
            self.head_scale[slot] = 1.0

    def load(self, slots: Tensor) -> Tensor:
        """States [B, H, P, N] float32 of the slots [B] int64."""
        if self.format in (StateFormat.FLOAT32, StateFormat.FLOAT16):
            return self.data[slots].float()
        assert self.block_scale is not None
        scale = _index_bytes(self.block_scale, slots).float()
        if self.format is StateFormat.FP8:
            values = _index_bytes(self.data, slots).float()
            return values * scale.repeat_interleave(FP8_BLOCK, dim=-1)[..., : values.shape[-1]]
        assert self.head_scale is not None
        values = _unpack_e2m1(self.data[slots])
        scale = scale * self.head_scale[slots][:, :, None, None]
        return values * scale.repeat_interleave(FP4_BLOCK, dim=-1)

    def store(
        self, slots: Sequence[int] | Tensor, states: Tensor, rounding: Rounding,
        words: Sequence[NDArray[np.uint32] | None] | Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write float32 states [B, H, P, N] of the slots [B]; nothing is read back.

        words: random words [B, H, P * N] for stochastic rounding, a tensor below 2^32 or an array a row.
        """
        index = torch.as_tensor(slots, device=self.data.device)
        if self.format is StateFormat.FLOAT32:
            self.data[index] = states
            return
        random = None
        if rounding is Rounding.STOCHASTIC:
            given = words if isinstance(words, Tensor) else torch.from_numpy(np.stack([_given(w) for w in words or ()]))
            random = given.to(self.data.device)
        self._write(index, encode(states, self.format, random))

    def _write(self, slots: Tensor, stored: Encoded) -> None:
        values = stored.values
        _assign(self.data, slots, _pack_e2m1(values) if self.format is StateFormat.NVFP4 else values)
        if stored.block_scale is not None:
            assert self.block_scale is not None
            _assign(self.block_scale, slots, stored.block_scale)
        if stored.head_scale is not None:
            assert self.head_scale is not None
            self.head_scale[slots] = stored.head_scale


def _given(words: NDArray[np.uint32] | None) -> NDArray[np.int64]:
    if words is None:
        raise ContractError("store", "words", expected="random words for stochastic rounding", got=None)
    return words.astype(np.int64)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory in a type that torch can index and fill; one element stays one element."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


def _index_bytes(tensor: Tensor, slots: Tensor) -> Tensor:
    """tensor[slots] for any element type."""
    return _bytes_of(tensor)[slots].view(tensor.dtype)


def _assign(tensor: Tensor, slots: Tensor, value: Tensor) -> None:
    _bytes_of(tensor)[slots] = _bytes_of(value.to(tensor.dtype))


def _unpack_e2m1(packed: Tensor) -> Tensor:
    """[..., N / 2] uint8 -> [..., N] float32."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).float()
    normal = (2.0 + mantissa) * (1 << exponent.int()).float() * 0.25  # (1 + m / 2) 2^(e - 1)
    magnitude = torch.where(exponent == 0, mantissa * 0.5, normal)
    return torch.where(codes > 7, -magnitude, magnitude)


def _pack_e2m1(values: Tensor) -> Tensor:
    """[..., N] numbers on the E2M1 grid -> [..., N / 2] uint8."""
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for value in E2M1_VALUES[1:]:
        codes += magnitude >= value
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4)
