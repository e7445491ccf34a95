"""Matrices as checkpoints store them: plain, FP8 or NVFP4, and stacks of experts. numpy and ml_dtypes only.

Formats (NVIDIA ModelOpt): FP8  w = weight * weight_scale;  NVFP4  w = E2M1(code) * weight_scale * weight_scale_2,
with column 2j in the low nibble of byte j and one weight_scale per 16 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from trtllm_replayssm.dtypes import E2M1_VALUES, FP4_BLOCK
from trtllm_replayssm.errors import ContractError

_MAGNITUDES = np.asarray(E2M1_VALUES, dtype=np.float32)
_CODES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])  # value of each 4-bit code; bit 3 is the sign
_PAIRS = np.stack(
    [_CODES[np.arange(256) & 15], _CODES[np.arange(256) >> 4]], axis=1
)  # [256, 2]: low nibble, high nibble
_CHUNK_ELEMS = 1 << 22  # elements decoded at a time, which bounds the temporaries


class MatrixFormat(str, Enum):
    """How the elements of a matrix are stored."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"
    FP8 = "fp8"
    NVFP4 = "nvfp4"

    @property
    def quantised(self) -> bool:
        """Whether scales belong to the elements."""
        return self in (MatrixFormat.FP8, MatrixFormat.NVFP4)


_DENSE_FORMATS = {
    np.dtype(ml_dtypes.bfloat16): MatrixFormat.BF16,
    np.dtype(np.float16): MatrixFormat.F16,
    np.dtype(np.float32): MatrixFormat.F32,
}


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix:
    """data: [N, K] bfloat16, float16 or float32."""

    data: NDArray[Any]

    def __post_init__(self) -> None:
        if self.data.ndim != 2 or self.data.dtype not in _DENSE_FORMATS:
            raise _error("data", "[N, K] bfloat16, float16 or float32", self.data)

    @property
    def format(self) -> MatrixFormat:
        """By the element type."""
        return _DENSE_FORMATS[self.data.dtype]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): out, in."""
        return _shape2(self.data)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.data.nbytes

    def dequantize(self, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """[N, K] float32 or float64, exact."""
        return self.data.astype(_float_type(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    """weight: [N, K] E4M3; scale: float32, [] for the matrix or [N, 1] per row; input_scale: of static activations."""

    weight: NDArray[Any]
    scale: NDArray[np.float32]
    input_scale: float | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.dtype != ml_dtypes.float8_e4m3fn:
            raise _error("weight", "[N, K] float8_e4m3fn", self.weight)
        if self.scale.shape not in ((), (self.weight.shape[0], 1)) or self.scale.dtype != np.float32:
            raise _error("scale", f"[] or [{self.weight.shape[0]}, 1] float32", self.scale)

    @property
    def format(self) -> MatrixFormat:
        """Always FP8."""
        return MatrixFormat.FP8

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): out, in."""
        return _shape2(self.weight)

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales included."""
        return self.weight.nbytes + self.scale.nbytes + _input_bytes(self.input_scale)

    def dequantize(self, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """[N, K]: exact in float64; in float32 the exact product rounded once."""
        kind = _float_type(dtype)
        values = self.weight.astype(kind)
        values *= self.scale.astype(kind)
        return values


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4Matrix:
    """packed: [N, K / 2] uint8; block_scale: [N, K / 16] E4M3; scale_2: multiplier of all blocks, a float32 value."""

    packed: NDArray[np.uint8]
    block_scale: NDArray[Any]
    scale_2: float
    input_scale: float | None = None

    def __post_init__(self) -> None:
        if self.packed.ndim != 2 or self.packed.dtype != np.uint8 or self.packed.shape[1] % (FP4_BLOCK // 2):
            raise _error("packed", "[N, K / 2] uint8 with K a multiple of 16", self.packed)
        rows, blocks = self.packed.shape[0], self.packed.shape[1] * 2 // FP4_BLOCK
        if self.block_scale.shape != (rows, blocks) or self.block_scale.dtype != ml_dtypes.float8_e4m3fn:
            raise _error("block_scale", f"[{rows}, {blocks}] float8_e4m3fn", self.block_scale)
        if float(np.float32(self.scale_2)) != self.scale_2:
            raise ContractError("Nvfp4Matrix", "scale_2", expected="a float32 value", got=self.scale_2)

    @property
    def format(self) -> MatrixFormat:
        """Always NVFP4."""
        return MatrixFormat.NVFP4

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): out, in."""
        return self.packed.shape[0], self.packed.shape[1] * 2

    @property
    def nbytes(self) -> int:
        """Stored bytes, scales included."""
        return self.packed.nbytes + self.block_scale.nbytes + 4 + _input_bytes(self.input_scale)

    def dequantize(self, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """[N, K]: exact in float64; in float32 the exact product rounded once.

        code * block_scale has at most 6 significant bits and is exact in float32, so that the product with scale_2 is
        the only rounding.
        """
        kind = _float_type(dtype)
        rows, columns = self.shape
        out = np.empty((rows, columns), dtype=kind)
        step = max(1, _CHUNK_ELEMS // max(1, columns))
        for begin in range(0, rows, step):
            part = slice(begin, min(rows, begin + step))
            values = _PAIRS[self.packed[part]].reshape(-1, columns // FP4_BLOCK, FP4_BLOCK).astype(kind)
            values *= self.block_scale[part].astype(kind)[:, :, None]
            np.multiply(values.reshape(-1, columns), kind.type(self.scale_2), out=out[part])
        return out


Matrix = DenseMatrix | Fp8Matrix | Nvfp4Matrix


class ExpertStack:
    """The matrices of one projection of all experts, read one at a time; nothing is kept.

    shape: (experts, out, in); read(e) -> the matrix of expert e.
    """

    def __init__(self, shape: tuple[int, int, int], read: Callable[[int], Matrix]) -> None:
        self.shape = shape
        self._read = read

    def __len__(self) -> int:
        return self.shape[0]

    def matrix(self, expert: int) -> Matrix:
        """The [out, in] matrix of one expert."""
        if not 0 <= expert < self.shape[0]:
            raise ContractError("ExpertStack.matrix", "expert", expected=f"0..{self.shape[0] - 1}", got=expert)
        return self._read(expert)


def _shape2(array: NDArray[Any]) -> tuple[int, int]:
    return array.shape[0], array.shape[1]


def _input_bytes(input_scale: float | None) -> int:
    return 0 if input_scale is None else 4


def _float_type(dtype: DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ContractError("dequantize", "dtype", expected="float32 or float64", got=kind)
    return kind


def _error(argument: str, expected: str, array: NDArray[Any]) -> ContractError:
    return ContractError("Matrix", argument, expected=expected, got=f"{list(array.shape)} {array.dtype}")
