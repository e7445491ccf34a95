"""Random parameters for the public geometries, stored in the formats of the public checkpoints.

For timing, memory and compilation of full-size engines without their weights. Values are small noise around what keeps
activations finite; every stack of experts shares one pool of random bytes, so that a hundred gigabytes cost little.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.builders.parameters import DENSE_TYPES, E4M3, parameter_specs
from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.matrix import DenseMatrix, ExpertStack, Fp8Matrix, Matrix, MatrixFormat, Nvfp4Matrix
from trtllm_replayssm.weights.precision_maps import published_format
from trtllm_replayssm.weights.random_values import FP4_MEAN_SQUARE, unit_scale, vector_centre, vector_noise
from trtllm_replayssm.weights.tensor_parallel import ALONE

_STEP = 64  # bytes between the beginnings of two experts in the shared pool


class RandomParameters:
    """Parameters of `geometry`, whose layer 0 is layer `first_layer` of the public model `preset`."""

    parallel = ALONE

    def __init__(self, geometry: ModelGeometry, preset: str, *, first_layer: int = 0) -> None:
        self.geometry = geometry
        self._preset = preset
        self._first_layer = first_layer
        self._specs = parameter_specs(geometry)

    @property
    def identity(self) -> str:
        """See `Parameters`: the numbers follow from the names of the parameters."""
        return f"random weights of {self._preset} from layer {self._first_layer} on"

    def format_of(self, name: str) -> MatrixFormat:
        """See `Parameters`."""
        return published_format(self._preset, name, self._first_layer)

    def matrix(self, name: str) -> Matrix:
        """See `Parameters`."""
        rows, columns = self._specs[name].shape
        fmt = self.format_of(name)
        pool = self._generator(name).integers(0, 256, _stored_bytes(fmt, rows, columns), dtype=np.uint8)
        return _matrix(fmt, pool, rows, columns)

    def vector(self, name: str) -> NDArray[np.float32]:
        """See `Parameters`: weights of norms around 1, everything else around 0."""
        spec = self._specs[name]
        noise = self._generator(name).standard_normal(spec.shape, dtype=np.float32) * np.float32(vector_noise(spec))
        result: NDArray[np.float32] = noise + np.float32(vector_centre(spec))
        return result

    def experts(self, name: str) -> ExpertStack:
        """See `Parameters`."""
        experts, rows, columns = self._specs[name].shape
        fmt = self.format_of(name)
        size = _stored_bytes(fmt, rows, columns)
        pool = self._generator(name).integers(0, 256, size + _STEP * experts, dtype=np.uint8)
        return ExpertStack(
            (experts, rows, columns), lambda e: _matrix(fmt, pool[_STEP * e : _STEP * e + size], rows, columns)
        )

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(name.encode()))


def _stored_bytes(fmt: MatrixFormat, rows: int, columns: int) -> int:
    if fmt is MatrixFormat.NVFP4:
        return rows * columns // 2
    return rows * columns * (1 if fmt is MatrixFormat.FP8 else DENSE_TYPES[fmt].itemsize)


def _matrix(fmt: MatrixFormat, pool: NDArray[np.uint8], rows: int, columns: int) -> Matrix:
    """A matrix of the random bytes `pool`, scaled so that a product of unit inputs has unit size."""
    if fmt is MatrixFormat.NVFP4:
        scales = np.ones((rows, columns // FP4_BLOCK), dtype=E4M3)
        unit = float(np.float32(unit_scale(columns, FP4_MEAN_SQUARE)))
        return Nvfp4Matrix(pool.reshape(rows, columns // 2), scales, unit)
    if fmt is MatrixFormat.FP8:
        codes: NDArray[Any] = (pool & np.uint8(0xB7)).reshape(rows, columns).view(E4M3)  # magnitudes below 2
        return Fp8Matrix(codes, np.asarray(unit_scale(columns), dtype=np.float32))
    if fmt is MatrixFormat.BF16:
        return DenseMatrix(_small_bfloat16(pool, rows, columns))
    noise = (pool.view(np.uint16)[: rows * columns].astype(np.float32) - 32768.0) / 32768.0
    return DenseMatrix((noise * np.float32(unit_scale(columns))).reshape(rows, columns).astype(DENSE_TYPES[fmt]))


def _small_bfloat16(pool: NDArray[np.uint8], rows: int, columns: int) -> NDArray[Any]:
    """bfloat16 values of magnitude 1/sqrt(columns) to twice that, made of random sign and mantissa bits in place."""
    words = pool.view(np.uint16)
    exponent = 127 - math.ceil(math.log2(columns) / 2)
    words &= np.uint16(0x807F)
    words |= np.uint16(exponent << 7)
    return words.reshape(rows, columns).view(DENSE_TYPES[MatrixFormat.BF16])
