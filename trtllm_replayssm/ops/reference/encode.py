"""State formats as tensors: `spec.formats` for whole batches on any device, the same numbers, nothing read back.

States are [B, H, P, N] float32. Rounding is done in float64, where every step of it is exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.dtypes import FP4_BLOCK, FP4_MAX, FP8_BLOCK, FP8_MAX, StateFormat
from trtllm_replayssm.spec.formats import E2M1, E4M3, FLOAT16, SMALLEST_E4M3, SMALLEST_HEAD_SCALE, SMALLEST_SCALE, Grid


class Encoded(NamedTuple):
    """values: [B, H, P, N] float64 on the format's grid; block_scale: [B, H, P, blocks]; head_scale: [B, H]."""

    values: Tensor
    block_scale: Tensor | None
    head_scale: Tensor | None


def encode(states: Tensor, fmt: StateFormat, words: Tensor | None) -> Encoded:
    """states in a format below float32; words [B, H, P * N] int64: round stochastically, None: to nearest."""
    random = None if words is None else words.view(states.shape)
    if fmt is StateFormat.FLOAT16:
        return Encoded(round_to_grid(states, FLOAT16, random), None, None)
    if fmt is StateFormat.FP8:
        amax = _block_amax(states, FP8_BLOCK)
        scale = _positive(_quotient(amax, FP8_MAX), amax)
        return Encoded(round_to_grid(_scaled(states, scale, FP8_BLOCK), E4M3, random), scale, None)
    amax = _block_amax(states, FP4_BLOCK)
    head_amax = amax.amax(dim=(-2, -1))
    head_scale = _positive(_quotient(head_amax, FP4_MAX * FP8_MAX), head_amax, SMALLEST_HEAD_SCALE)
    target = amax * (head_scale * FP4_MAX).reciprocal()[..., None, None]
    block_scale = torch.where(amax > 0, round_to_grid(target, E4M3, None).clamp(min=SMALLEST_E4M3), 1.0).float()
    scale = block_scale * head_scale[..., None, None]
    return Encoded(round_to_grid(_scaled(states, scale, FP4_BLOCK), E2M1, random), block_scale, head_scale)


def round_to_grid(x: Tensor, grid: Grid, words: Tensor | None) -> Tensor:
    """`spec.formats.round_to_grid`: float32 -> float64 numbers of the grid."""
    wide = x.double()
    if not grid.has_nan:
        wide = wide.masked_fill(wide.isnan(), grid.largest)
    magnitude = wide.abs().clamp(max=grid.largest)
    exponent = torch.frexp(magnitude).exponent.long()
    # 2^e from its bits: a power function may be off by an ulp
    ulp = (((exponent - 1).clamp(min=grid.min_exponent) - grid.mantissa_bits + 1023) << 52).view(torch.float64)
    scaled = magnitude / ulp
    if words is None:
        steps = scaled.round()
    else:
        lower = scaled.floor()
        steps = lower + (words < ((scaled - lower) * 4294967296.0).floor())
    return (steps * ulp).clamp(max=grid.largest).copysign(wide)


def _quotient(amax: Tensor, largest: float) -> Tensor:
    """By IEEE division: torch multiplies by the reciprocal of a Python number."""
    return amax / torch.full((), largest, device=amax.device)


def _positive(scale: Tensor, amax: Tensor, smallest: np.float32 = SMALLEST_SCALE) -> Tensor:
    return torch.where(amax > 0, scale.clamp(min=float(smallest)), 1.0)


def _block_amax(states: Tensor, block: int) -> Tensor:
    """Largest finite magnitude of each block along the last axis, [..., blocks]."""
    magnitude = torch.where(states.isfinite(), states.abs(), 0.0)
    padded = functional.pad(magnitude, (0, -states.shape[-1] % block))
    largest: Tensor = padded.unflatten(-1, (-1, block)).amax(-1)
    return largest


def _scaled(states: Tensor, scale: Tensor, block: int) -> Tensor:
    """Each number times the reciprocal of its block's scale, which is one float32 number (a division is correct)."""
    inverse = torch.ones_like(scale) / scale
    return states * inverse.repeat_interleave(block, dim=-1)[..., : states.shape[-1]]
