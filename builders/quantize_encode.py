"""Arrays -> NVFP4 and FP8 bytes in the layout of NVIDIA ModelOpt: pure functions over numpy arrays.

Scales by maximum calibration: scale_2 = amax / (6 * 448), block scale = E4M3(block amax / (6 * scale_2)). Given the
scales, every element becomes the nearest representable value, ties to the even code. NVFP4 decides on the float32
quotient, as ModelOpt does, so that the bytes are the same; the exact quotient would differ only within 2^-23 of a tie.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.dtypes import E2M1_VALUES, FP4_BLOCK, FP4_MAX, FP8_MAX
from trtllm_replayssm.errors import ContractError

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E4M3_MAGNITUDES = np.arange(0x7F, dtype=np.uint8).view(_E4M3).astype(np.float64)  # by code, without the sign
_E4M3_MIN = np.float32(2.0**-9)  # smallest positive E4M3 value
_SCALE_MIN = np.float32(2.0**-117)  # times the smallest block scale it is the smallest normal float32
_CHUNK_ELEMS = 1 << 20  # elements encoded at a time, which bounds the float64 temporaries


def absolute_maximum(values: NDArray[Any]) -> np.float32:
    """max |values| of a floating [N, K] array; ContractError when a value is NaN or infinite."""
    amax = 0.0
    for part in _row_chunks(values):
        with np.errstate(invalid="ignore"):  # NaN is reported below
            high, low = float(part.max(initial=0)), float(part.min(initial=0))
        if not (math.isfinite(high) and math.isfinite(low)):
            raise ContractError("quantize", "values", expected="finite numbers", got="NaN or infinity")
        amax = max(amax, high, -low)
    result: np.float32 = np.float32(amax)
    return result


def nvfp4_scale_2(amax: np.float32) -> np.float32:
    """The multiplier of all blocks of a matrix; 1 for a matrix of zeros. Never zero."""
    return _scale(amax, FP4_MAX * FP8_MAX)


def encode_nvfp4(values: NDArray[Any], scale_2: np.float32) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """values: [N, K] floating, K a multiple of 16 -> packed [N, K / 2] uint8, block scales [N, K / 16] E4M3."""
    rows, columns = values.shape
    if columns % FP4_BLOCK:
        raise ContractError("encode_nvfp4", "values", expected="columns a multiple of 16", got=list(values.shape))
    packed = np.empty((rows, columns // 2), dtype=np.uint8)
    scales = np.empty((rows, columns // FP4_BLOCK), dtype=_E4M3)
    row = 0
    for part in _row_chunks(values):
        here = slice(row, row + len(part))
        blocks = part.astype(np.float32).reshape(len(part), -1, FP4_BLOCK)
        scales[here] = _block_scales(blocks, scale_2)
        codes = _nearest_codes(blocks / (scales[here].astype(np.float32) * scale_2)[..., None])
        packed[here] = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(len(part), -1)
        row += len(part)
    return packed, scales


def fp8_scale(amax: np.float32) -> np.float32:
    """The scale of a matrix, amax / 448; 1 for a matrix of zeros. Never zero."""
    return _scale(amax, FP8_MAX)


def encode_fp8(values: NDArray[Any], scale: np.float32) -> NDArray[Any]:
    """values: [N, K] floating -> [N, K] E4M3, saturated; the nearest value: halfway points are exact in float64."""
    halfway = (_E4M3_MAGNITUDES[:-1] + _E4M3_MAGNITUDES[1:]) / 2 * np.float64(scale)
    out = np.empty(values.shape, dtype=_E4M3)
    row = 0
    for part in _row_chunks(values):
        magnitude = np.abs(part.astype(np.float32)).astype(np.float64)
        codes = np.searchsorted(halfway, magnitude).astype(np.uint8)
        # a tie goes to the even code; the search found the lower one
        codes += (codes % 2 == 1) & (halfway[np.minimum(codes, len(halfway) - 1)] == magnitude)
        codes |= (part < 0).astype(np.uint8) << 7
        out[row : row + len(part)] = codes.view(_E4M3)
        row += len(part)
    return out


def _scale(amax: np.float32, largest: float) -> np.float32:
    """amax / largest in float32, in the range where float32 is precise."""
    scale: np.float32 = np.float32(1) if amax == 0 else np.float32(max(amax / np.float32(largest), _SCALE_MIN))
    return scale


def _row_chunks(values: NDArray[Any]) -> list[NDArray[Any]]:
    step = max(1, _CHUNK_ELEMS // max(1, values.shape[1]))
    return [values[begin : begin + step] for begin in range(0, len(values), step)]


def _block_scales(blocks: NDArray[np.float32], scale_2: np.float32) -> NDArray[Any]:
    """[N, K / 16] E4M3. A block of zeros gets 1; any other block a scale that is not zero, though its values may be."""
    amax = np.abs(blocks).max(axis=-1)
    scale = amax / np.float32(np.float32(FP4_MAX) * scale_2)
    scale = np.where(amax == 0, np.float32(1), np.clip(scale, _E4M3_MIN, np.float32(FP8_MAX)))
    scales: NDArray[Any] = scale.astype(_E4M3)
    return scales


def _nearest_codes(quotients: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The E2M1 code nearest to each quotient, a tie to the even code; what rounds to 0 keeps its sign."""
    magnitude = np.abs(quotients)
    codes = np.zeros(quotients.shape, dtype=np.uint8)
    for lower in range(len(E2M1_VALUES) - 1):
        halfway = np.float32((E2M1_VALUES[lower] + E2M1_VALUES[lower + 1]) / 2)
        codes += magnitude >= halfway if lower % 2 else magnitude > halfway
    codes |= (quotients < 0).astype(np.uint8) << 3
    return codes
