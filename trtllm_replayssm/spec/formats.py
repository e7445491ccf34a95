"""State formats: how a float32 checkpoint is stored and read back (paper, Appendix E.4.1).

Stored values are kept as the numbers their codes mean; `StoredState.decode` multiplies the scales in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.dtypes import FP4_BLOCK, FP4_MAX, FP8_BLOCK, FP8_MAX, FP16_MAX, Rounding, StateFormat
from trtllm_replayssm.errors import ContractError

# A non-zero block never gets a subnormal scale, nor one without a finite reciprocal: an NVFP4 block's is its head's
# times at least the smallest E4M3 number.
SMALLEST_SCALE = np.float32(2.0**-126)
SMALLEST_E4M3 = 2.0**-9
SMALLEST_HEAD_SCALE = np.float32(2.0**-117)


@dataclass(frozen=True, slots=True)
class Grid:
    """A binary floating-point grid: mantissa bits, exponent of the smallest normal, largest finite value, NaN code."""

    mantissa_bits: int
    min_exponent: int
    largest: float
    has_nan: bool = True


FLOAT16 = Grid(10, -14, FP16_MAX)
E4M3 = Grid(3, -6, FP8_MAX)
E2M1 = Grid(1, 0, FP4_MAX, has_nan=False)


def round_to_grid(x: NDArray[np.float32], grid: Grid, words: NDArray[np.uint32] | None = None) -> NDArray[np.float64]:
    """x rounded onto `grid`, saturating: to nearest (ties to even), or stochastically with one random word each.

    Stochastic: with f the exact fraction of the way to the next magnitude, round up iff word < floor(f * 2^32).
    NaN stays NaN, or becomes the largest positive value on a grid without NaN, as `cvt.satfinite` does.
    """
    wide = np.asarray(x, np.float64)
    if not grid.has_nan:
        wide = np.where(np.isnan(wide), grid.largest, wide)
    magnitude = np.minimum(np.abs(wide), grid.largest)
    _, exponent = np.frexp(magnitude)  # magnitude = m * 2^exponent with 0.5 <= m < 1
    ulp = np.ldexp(1.0, np.maximum(exponent - 1, grid.min_exponent) - grid.mantissa_bits)
    scaled = magnitude / ulp
    if words is None:
        steps = np.rint(scaled)
    else:
        lower = np.floor(scaled)
        steps = lower + (words.astype(np.float64) < np.floor((scaled - lower) * 4294967296.0))
    return np.asarray(np.copysign(np.minimum(steps * ulp, grid.largest), wide))


@dataclass(frozen=True, slots=True)
class StoredState:
    """One head-major state copy.

    values: [H, P, N] numbers on the format's grid; block_scale: [H, P, blocks] or None;
    head_scale: [H] (NVFP4) or None.
    """

    format: StateFormat
    values: NDArray[np.float64]
    block_scale: NDArray[np.float64] | None = None
    head_scale: NDArray[np.float32] | None = None

    def decode(self) -> NDArray[np.float32]:
        """The state [H, P, N] as float32: value times its float32 scale (NVFP4: block scale times head scale)."""
        if self.block_scale is None:
            return self.values.astype(np.float32)
        scale = self.block_scale.astype(np.float32)
        if self.head_scale is not None:
            scale = scale * self.head_scale[:, None, None]
        block = FP8_BLOCK if self.format is StateFormat.FP8 else FP4_BLOCK
        return (self.values.astype(np.float32) * _spread(scale, block, self.values.shape[-1])).astype(np.float32)


def encode(
    state: NDArray[np.floating],
    fmt: StateFormat,
    rounding: Rounding = Rounding.NEAREST,
    words: NDArray[np.uint32] | None = None,
) -> StoredState:
    """Store a state [H, P, N] (taken as float32) in `fmt`. words: [H, P * N] random words for stochastic rounding.

    Numbers are multiplied by the float32 reciprocal of their scale, then rounded.
    """
    x = np.asarray(state, np.float32)
    if fmt is StateFormat.FLOAT32:
        return StoredState(fmt, x.astype(np.float64))
    random = None
    if rounding is Rounding.STOCHASTIC:
        if words is None:
            raise ContractError("encode", "words", expected="random words for stochastic rounding", got=None)
        random = words.reshape(x.shape)
    if fmt is StateFormat.FLOAT16:
        return StoredState(fmt, round_to_grid(x, FLOAT16, random))
    if fmt is StateFormat.FP8:
        scale = fp8_scales(x)
        scaled = x * _spread(np.float32(1.0) / scale, FP8_BLOCK, x.shape[-1])
        return StoredState(fmt, round_to_grid(scaled, E4M3, random), scale.astype(np.float64))
    block_scale, head_scale = nvfp4_scales(x)
    scale = block_scale.astype(np.float32) * head_scale[:, None, None]
    scaled = x * _spread(np.float32(1.0) / scale, FP4_BLOCK, x.shape[-1])
    return StoredState(fmt, round_to_grid(scaled, E2M1, random), block_scale, head_scale)


def fp8_scales(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """amax / 448 per block of at most 128 along the last axis; 1 for a block of zeros. Only finite values count."""
    amax = _block_amax(x, FP8_BLOCK)
    return _positive(amax / np.float32(FP8_MAX), amax)


def nvfp4_scales(x: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Block scales [H, P, N / 16] on the E4M3 grid and the head's float32 scale [H] = amax / (6 * 448)."""
    amax = _block_amax(x, FP4_BLOCK)
    head_amax = amax.max(axis=(1, 2))
    head_scale = _positive(head_amax / np.float32(FP4_MAX * FP8_MAX), head_amax, SMALLEST_HEAD_SCALE)
    target = amax * (np.float32(1.0) / (np.float32(FP4_MAX) * head_scale))[:, None, None]
    block_scale = np.maximum(round_to_grid(target, E4M3), SMALLEST_E4M3)
    return np.where(amax > 0, block_scale, 1.0), head_scale


def _positive(
    scale: NDArray[np.float32], amax: NDArray[np.float32], smallest: np.float32 = SMALLEST_SCALE
) -> NDArray[np.float32]:  # fmt: skip
    return np.asarray(np.where(amax > 0, np.maximum(scale, smallest), np.float32(1.0)), np.float32)


def _block_amax(x: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    magnitude = np.where(np.isfinite(x), np.abs(x), np.float32(0.0))
    parts = [magnitude[..., i : i + block].max(axis=-1) for i in range(0, x.shape[-1], block)]
    return np.stack(parts, axis=-1)


def _spread(scale: NDArray[np.float32], block: int, elems: int) -> NDArray[np.float32]:
    return np.repeat(scale, block, axis=-1)[..., :elems]
