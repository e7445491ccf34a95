"""Linear layers in the format their weights are stored in: dense, FP8, or NVFP4 with quantised activations.

Quantised products are written in float32 around quantise/dequantise pairs; the compiler turns them into FP8 and FP4
GEMMs (weights alone in FP4 would become a copy of the matrix in BF16 at every run). Activation scales: FP8 uses the
checkpoint's static `input_scale`; NVFP4 finds a scale per 16 values at run time, below one factor for the tensor, which
is `input_scale` too. Where a checkpoint has none, the factor is 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_replayssm.builders.network import Network
from trtllm_replayssm.builders.parameters import DENSE_TYPES
from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.weights.matrix import DenseMatrix, Fp8Matrix, Matrix, MatrixFormat, Nvfp4Matrix

_ACTIVATION_FORMATS = {
    "float32": MatrixFormat.F32, "float16": MatrixFormat.F16, "bfloat16": MatrixFormat.BF16,
}  # fmt: skip


def linear(net: Network, x: Any, name: str, matrix: Matrix) -> Any:
    """x [B, T, K] times the transpose of `matrix` [N, K] -> [B, T, N] in the activation type.

    The matmul layer is named `name` without `.weight`, which is how a build log tells what ran in which type.
    """
    module = name.removesuffix(".weight")
    if isinstance(matrix, Fp8Matrix):
        return net.narrow(_fp8(net, x, module, matrix))
    if isinstance(matrix, Nvfp4Matrix):
        return net.narrow(_nvfp4(net, x, module, matrix))
    return net.matmul_transposed(x, dense_constant(net, name, matrix), module)


def dense_constant(net: Network, name: str, matrix: DenseMatrix, *, dtype: str | None = None, rank: int = 3) -> Any:
    """A dense matrix in the activation type (or `dtype`), [1, N, K] or [N, K]: mapped bytes where possible."""
    wanted = DENSE_TYPES[_ACTIVATION_FORMATS[dtype or net.activation]]
    data = matrix.data if matrix.data.dtype == wanted else matrix.data.astype(np.float32).astype(wanted)
    return net.constant(name, data, shape=(1,) * (rank - 2) + matrix.shape)


def _fp8(net: Network, x: Any, module: str, matrix: Fp8Matrix) -> Any:
    rows, columns = matrix.shape
    activation_scale = net.scalar(matrix.input_scale or 1.0, rank=0)
    quantised = net.named(
        net.definition.add_quantize(x, activation_scale, net.dtype("float8_e4m3")), f"{module} quantise input"
    )
    left = net.definition.add_dequantize(quantised, activation_scale, net.dtype("float32"))
    stored = net.constant(f"{module}.weight", matrix.weight, shape=(1, rows, columns))
    per_row = matrix.scale.ndim > 0
    scale = net.constant(f"{module}.weight_scale", matrix.scale.reshape(-1), shape=(rows,) if per_row else ())
    right = net.definition.add_dequantize(stored, scale, net.dtype("float32"))
    if per_row:
        right.axis = 1
    return net.matmul_transposed(
        net.named(left, f"{module} input"), net.named(right, f"{module} decode weight"), module
    )


def _nvfp4(net: Network, x: Any, module: str, matrix: Nvfp4Matrix) -> Any:
    rows, columns = matrix.shape
    network, wide = net.definition, net.dtype("float32")
    factor = net.scalar(matrix.input_scale or 1.0, rank=0)
    quantise = network.add_dynamic_quantize(
        x, len(x.shape) - 1, FP4_BLOCK, net.dtype("float4_e2m1"), net.dtype("float8_e4m3")
    )
    quantise.set_input(1, factor)
    codes = net.named(quantise, f"{module} quantise input")
    block = net.named(network.add_dequantize(quantise.get_output(1), factor, wide), f"{module} input scale")
    left = net.named(network.add_dequantize(codes, block, wide), f"{module} input")

    stored = net.constant(f"{module}.weight", matrix.packed, shape=(1, rows, columns), fp4=True)
    scales = net.constant(f"{module}.weight_scale", matrix.block_scale, shape=(1, rows, columns // FP4_BLOCK))
    scale_2 = net.constant(f"{module}.weight_scale_2", np.full((1,), matrix.scale_2, dtype=np.float32), shape=())
    block_scale = net.named(network.add_dequantize(scales, scale_2, wide), f"{module} decode scale")
    right = net.named(network.add_dequantize(stored, block_scale, wide), f"{module} decode weight")
    return net.matmul_transposed(left, right, module)
