"""Where a build takes parameters from: a checkpoint, random numbers, or untouched zeros for the first pass.

All of them hand out matrices in the storage format in which the engine will hold them.
"""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.identity import checkpoint_identity
from trtllm_replayssm.weights.matrix import DenseMatrix, ExpertStack, Fp8Matrix, Matrix, MatrixFormat, Nvfp4Matrix
from trtllm_replayssm.weights.shard import CheckpointShard
from trtllm_replayssm.weights.tensor_parallel import ALONE, TensorParallel

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
DENSE_TYPES = {
    MatrixFormat.BF16: np.dtype(ml_dtypes.bfloat16), MatrixFormat.F16: np.dtype(np.float16),
    MatrixFormat.F32: np.dtype(np.float32),
}  # fmt: skip


class Parameters(Protocol):
    """Parameters by canonical name, of a whole model or of one rank; geometry is the rank's then."""

    geometry: ModelGeometry

    @property
    def parallel(self) -> TensorParallel:
        """Which rank of how many they belong to."""
        ...

    @property
    def identity(self) -> str:
        """What they were taken from, of the whole model: the same text for the same weights alone."""
        ...

    def format_of(self, name: str) -> MatrixFormat:
        """Format of a matrix, or of a stack's experts, without reading it."""
        ...

    def matrix(self, name: str) -> Matrix:
        """A matrix [out, in]."""
        ...

    def vector(self, name: str) -> NDArray[np.float32]:
        """A vector or convolution."""
        ...

    def experts(self, name: str) -> ExpertStack:
        """A stack of experts."""
        ...


class CheckpointParameters:
    """A checkpoint's own formats; dequantised: every quantised matrix becomes BF16 when it is read."""

    parallel = ALONE

    def __init__(self, checkpoint: Checkpoint, *, dequantised: bool = False) -> None:
        self.geometry = checkpoint.geometry
        self._checkpoint = checkpoint
        self._dequantised = dequantised

    @property
    def identity(self) -> str:
        """See `Parameters`."""
        return checkpoint_identity(self._checkpoint)

    def format_of(self, name: str) -> MatrixFormat:
        """See `Parameters`."""
        fmt = self._checkpoint.storage(name)[0].format
        return MatrixFormat.BF16 if self._dequantised and fmt.quantised else fmt

    def matrix(self, name: str) -> Matrix:
        """See `Parameters`."""
        return self._settled(self._checkpoint.matrix(name))

    def vector(self, name: str) -> NDArray[np.float32]:
        """See `Parameters`."""
        return self._checkpoint.vector(name)

    def experts(self, name: str) -> ExpertStack:
        """See `Parameters`."""
        stack = self._checkpoint.experts(name)
        return ExpertStack(stack.shape, lambda e: self._settled(stack.matrix(e)))

    def _settled(self, matrix: Matrix) -> Matrix:
        if not (self._dequantised and matrix.format.quantised):
            return matrix
        return DenseMatrix(matrix.dequantize(np.float32).astype(DENSE_TYPES[MatrixFormat.BF16]))


class ParametersOver:
    """Parameters made of others: the same, but for what a subclass changes."""

    def __init__(self, inner: Parameters) -> None:
        self.geometry, self.parallel = inner.geometry, inner.parallel
        self._inner = inner
        self._specs = parameter_specs(inner.geometry)

    @property
    def identity(self) -> str:
        """See `Parameters`."""
        return self._inner.identity

    def format_of(self, name: str) -> MatrixFormat:
        """See `Parameters`."""
        return self._inner.format_of(name)

    def matrix(self, name: str) -> Matrix:
        """See `Parameters`."""
        return self._inner.matrix(name)

    def vector(self, name: str) -> NDArray[np.float32]:
        """See `Parameters`."""
        return self._inner.vector(name)

    def experts(self, name: str) -> ExpertStack:
        """See `Parameters`."""
        return self._inner.experts(name)


class HollowParameters(ParametersOver):
    """The same shapes and formats over zero pages that are never touched: memory on paper only. Experts are the
    others', since the first pass reads none.
    """

    def matrix(self, name: str) -> Matrix:
        """See `Parameters`."""
        rows, columns = self._specs[name].shape
        fmt = self.format_of(name)
        if fmt is MatrixFormat.FP8:
            return Fp8Matrix(np.zeros((rows, columns), dtype=E4M3), np.ones((), dtype=np.float32))
        if fmt is MatrixFormat.NVFP4:
            scales = np.zeros((rows, columns // FP4_BLOCK), dtype=E4M3)
            return Nvfp4Matrix(np.zeros((rows, columns // 2), dtype=np.uint8), scales, 1.0)
        return DenseMatrix(np.zeros((rows, columns), dtype=DENSE_TYPES[fmt]))

    def vector(self, name: str) -> NDArray[np.float32]:
        """See `Parameters`."""
        return np.zeros(self._specs[name].shape, dtype=np.float32)


class RankParameters(CheckpointShard):
    """One rank's share of the parameters of a whole model, in their formats."""

    def __init__(self, inner: Parameters, parallel: TensorParallel) -> None:
        """Raises ConfigError when the ranks cannot share the model evenly."""
        super().__init__(inner, parallel)
        self._whole = inner

    @property
    def identity(self) -> str:
        """See `Parameters`."""
        return self._whole.identity

    def format_of(self, name: str) -> MatrixFormat:
        """See `Parameters`."""
        return self._whole.format_of(name)


def parameter_specs(geometry: ModelGeometry) -> dict[str, ParamSpec]:
    """Every parameter of a geometry by name."""
    return {spec.name: spec for spec in model_of(geometry).parameters(geometry)}


def matrix_formats(parameters: Parameters) -> dict[str, MatrixFormat]:
    """Format of every matrix and stack of experts."""
    roles = (ParamRole.LINEAR, ParamRole.EMBEDDING, ParamRole.ROUTER, ParamRole.EXPERTS)
    specs: dict[str, Any] = parameter_specs(parameters.geometry)
    return {name: parameters.format_of(name) for name, spec in specs.items() if spec.role in roles}
