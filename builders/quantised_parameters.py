"""Dense linear layers quantised to NVFP4 while an engine is built: an explicit choice, weights only, no calibration."""

from __future__ import annotations

from trtllm_replayssm.builders.parameters import ParametersOver
from trtllm_replayssm.builders.quantize_encode import absolute_maximum, encode_nvfp4, nvfp4_scale_2
from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.weights.matrix import DenseMatrix, Matrix, MatrixFormat, Nvfp4Matrix


class DenseNvfp4Parameters(ParametersOver):
    """Parameters of a whole model whose dense linear layers become NVFP4 where they are unquantised.

    Those that a quantisation recipe may touch (never embeddings, output head, routers or the drafting head), with a
    number of columns that is a multiple of 16. Ranks take their cuts of what is quantised here.
    """

    def format_of(self, name: str) -> MatrixFormat:
        """See `Parameters`."""
        return MatrixFormat.NVFP4 if self._chosen(name) else self._inner.format_of(name)

    def matrix(self, name: str) -> Matrix:
        """See `Parameters`."""
        matrix = self._inner.matrix(name)
        if not self._chosen(name):
            return matrix
        assert isinstance(matrix, DenseMatrix)
        scale_2 = nvfp4_scale_2(absolute_maximum(matrix.data))
        packed, scales = encode_nvfp4(matrix.data, scale_2)
        return Nvfp4Matrix(packed, scales, float(scale_2))

    def _chosen(self, name: str) -> bool:
        spec = self._specs[name]
        return (
            spec.recipe == "dense"
            and spec.shape[-1] % FP4_BLOCK == 0
            and not self._inner.format_of(name).quantised
        )
