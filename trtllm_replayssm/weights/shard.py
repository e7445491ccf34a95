"""One tensor-parallel rank's view of a model's weights: the same names, with its pieces; never requantised."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import Cut, Span
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.matrix import DenseMatrix, ExpertStack, Fp8Matrix, Matrix, Nvfp4Matrix
from trtllm_replayssm.weights.tensor_parallel import TensorParallel, shard_geometry


class WeightSource(Protocol):
    """Where parameters come from, by canonical name: a `Checkpoint`, or one rank's share of it."""

    geometry: ModelGeometry

    def matrix(self, name: str) -> Matrix:
        """A LINEAR, EMBEDDING or ROUTER parameter."""
        ...

    def vector(self, name: str) -> NDArray[np.float32]:
        """A VECTOR or CONV parameter, float32."""
        ...

    def experts(self, name: str) -> ExpertStack:
        """An EXPERTS parameter."""
        ...


class CheckpointShard:
    """What one rank reads of a whole model. geometry: the rank's; stacks hold the rank's experts only, from 0."""

    def __init__(self, source: WeightSource, parallel: TensorParallel) -> None:
        """Raises ConfigError when the ranks cannot share the model evenly."""
        self.geometry = shard_geometry(source.geometry, parallel)
        self.parallel = parallel
        self._source = source
        whole = source.geometry
        self._cuts = {spec.name: spec.cut for spec in model_of(whole).parameters(whole)}

    def matrix(self, name: str) -> Matrix:
        """See `WeightSource.matrix`."""
        matrix, cut = self._source.matrix(name), self._cuts[name]
        return matrix if cut is None else cut_matrix(matrix, name, cut, self.parallel)

    def vector(self, name: str) -> NDArray[np.float32]:
        """See `WeightSource.vector`."""
        values, cut = self._source.vector(name), self._cuts[name]
        return values if cut is None else _take(values, self.parallel.slices(cut), cut.axis)

    def experts(self, name: str) -> ExpertStack:
        """See `WeightSource.experts`."""
        stack = self._source.experts(name)
        own = self.parallel.units(len(stack))
        return ExpertStack((len(own), *stack.shape[1:]), lambda e: stack.matrix(own[e]))


def own_rows(table: Matrix, name: str, rows: int, parallel: TensorParallel) -> Matrix:
    """A rank's part of an output head [rows, in]; of one that is the embedding table as well every rank holds all."""
    if parallel.size == 1 or table.shape[0] < rows:
        return table
    return cut_matrix(table, name, Cut(0, (Span(rows, rows),)), parallel)


def cut_matrix(matrix: Matrix, name: str, cut: Cut, parallel: TensorParallel) -> Matrix:
    """The rank's rows (axis 0) or columns (axis 1) of the matrix `name`, scales with them; views of one piece.

    Raises ConfigError for NVFP4 columns cut within a block of 16, whose scale two ranks would need.
    """
    slices, axis = parallel.slices(cut), cut.axis
    if isinstance(matrix, DenseMatrix):
        return DenseMatrix(_take(matrix.data, slices, axis))
    if isinstance(matrix, Fp8Matrix):
        scale = _take(matrix.scale, slices, 0) if axis == 0 and matrix.scale.ndim else matrix.scale
        return Fp8Matrix(_take(matrix.weight, slices, axis), scale, matrix.input_scale)
    if axis == 0:
        packed, scale = _take(matrix.packed, slices, 0), _take(matrix.block_scale, slices, 0)
        return Nvfp4Matrix(packed, scale, matrix.scale_2, matrix.input_scale)
    if any(s.start % FP4_BLOCK or s.stop % FP4_BLOCK for s in slices):
        raise ConfigError(
            "tensor parallel", "size", expected=f"columns of {name} in whole blocks of {FP4_BLOCK}",
            got=f"{parallel.size}, which cuts at {[s.stop for s in slices]}", hint="Choose a smaller tp_size",
        )  # fmt: skip
    packed = _take(matrix.packed, _scaled(slices, 2), 1)
    return Nvfp4Matrix(packed, _take(matrix.block_scale, _scaled(slices, FP4_BLOCK), 1), matrix.scale_2,
                       matrix.input_scale)  # fmt: skip


def _scaled(slices: list[slice], elements: int) -> list[slice]:
    return [slice(s.start // elements, s.stop // elements) for s in slices]


def _take(array: NDArray[Any], slices: list[slice], axis: int) -> NDArray[Any]:
    pieces = [array[s] if axis == 0 else array[:, s] for s in slices]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=axis)
