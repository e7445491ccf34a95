"""Matrix forms: dequantised values are the exact products of the stored bytes (oracle: rational arithmetic)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.weights.small_models import BF16, CODES, E4M3
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.weights import matrix as matrix_module
from trtllm_replayssm.weights.matrix import DenseMatrix, ExpertStack, Fp8Matrix, MatrixFormat, Nvfp4Matrix


def finite_e4m3(rng: np.random.Generator, shape: tuple[int, ...], *, positive: bool = False) -> NDArray[Any]:
    codes = rng.integers(1, 0x7F, shape, dtype=np.uint8)  # every positive finite value
    if not positive:
        codes |= rng.integers(0, 2, shape, dtype=np.uint8) << 7
    return codes.view(E4M3)


def random_nvfp4(rng: np.random.Generator, rows: int, columns: int, scale_2: float) -> Nvfp4Matrix:
    packed = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    return Nvfp4Matrix(packed, finite_e4m3(rng, (rows, columns // 16), positive=True), float(np.float32(scale_2)))


def exact(matrix: Nvfp4Matrix, row: int, column: int) -> Fraction:
    nibble = (int(matrix.packed[row, column // 2]) >> (4 * (column % 2))) & 15
    scale = Fraction(float(matrix.block_scale[row, column // 16].astype(np.float64)))
    return Fraction(float(CODES[nibble])) * scale * Fraction(matrix.scale_2)


@pytest.mark.parametrize("scale_2", [1.0, 3.7e-5, 0.3333333, 2.0**-126, 1e-44, 1e30])
def test_nvfp4_is_exact_in_float64_and_rounded_once_in_float32(scale_2: float) -> None:
    matrix = random_nvfp4(np.random.default_rng(1), 5, 48, scale_2)
    wide, narrow = matrix.dequantize(np.float64), matrix.dequantize()
    assert wide.dtype == np.float64 and narrow.dtype == np.float32 and wide.shape == matrix.shape == (5, 48)
    for row, column in np.ndindex(5, 48):
        assert Fraction(float(wide[row, column])) == exact(matrix, row, column)
    np.testing.assert_array_equal(narrow, wide.astype(np.float32))  # float64 holds it exactly: this rounds once


def test_nvfp4_low_nibble_comes_first() -> None:
    packed = np.array([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F]], np.uint8)
    got = Nvfp4Matrix(packed, np.array([[2.0]], E4M3), 0.5).dequantize()
    np.testing.assert_array_equal(got, [[0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, 0]])


def test_nvfp4_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = random_nvfp4(np.random.default_rng(2), 7, 32, 0.1)
    whole = matrix.dequantize()
    monkeypatch.setattr(matrix_module, "_CHUNK_ELEMS", 70)  # two rows at a time, the last alone
    np.testing.assert_array_equal(matrix.dequantize(), whole)


@pytest.mark.parametrize("per_row", [False, True])
def test_fp8_is_exact_in_float64_and_rounded_once_in_float32(per_row: bool) -> None:
    rng = np.random.default_rng(3)
    weight = finite_e4m3(rng, (6, 10))
    scale = rng.random((6, 1) if per_row else (), dtype=np.float32) + np.float32(1e-3)
    matrix = Fp8Matrix(weight, np.asarray(scale, np.float32), 2.0)
    wide = matrix.dequantize(np.float64)
    for row, column in np.ndindex(6, 10):
        own = float(scale[row, 0]) if per_row else float(scale)
        product = Fraction(float(weight[row, column].astype(np.float64))) * Fraction(own)
        assert Fraction(float(wide[row, column])) == product
    np.testing.assert_array_equal(matrix.dequantize(), wide.astype(np.float32))


@pytest.mark.parametrize(("dtype", "kind"), [(BF16, "bf16"), (np.float16, "f16"), (np.float32, "f32")])
def test_dense_is_exact(dtype: Any, kind: str) -> None:
    data = np.random.default_rng(4).standard_normal((3, 5)).astype(dtype)
    matrix = DenseMatrix(data)
    assert (matrix.format.value, matrix.format.quantised, matrix.nbytes) == (kind, False, data.nbytes)
    for target in (np.float32, np.float64):
        out = matrix.dequantize(target)
        assert out.dtype == target
        np.testing.assert_array_equal(out.astype(dtype), data)


def test_bytes_include_scales() -> None:
    rng = np.random.default_rng(5)
    assert random_nvfp4(rng, 4, 64, 1.0).nbytes == 4 * 32 + 4 * 4 + 4
    weight = finite_e4m3(rng, (4, 8))
    assert Fp8Matrix(weight, np.asarray(1, np.float32)).nbytes == 32 + 4
    assert Fp8Matrix(weight, np.ones((4, 1), np.float32), 1.0).nbytes == 32 + 16 + 4
    assert random_nvfp4(rng, 2, 16, 1.0).format is MatrixFormat.NVFP4


def test_wrong_arrays_are_refused() -> None:
    rng = np.random.default_rng(6)
    packed, scale = rng.integers(0, 256, (4, 16), dtype=np.uint8), finite_e4m3(rng, (4, 2), positive=True)
    for bad in (
        lambda: Nvfp4Matrix(packed[:, :12], scale, 1.0),
        lambda: Nvfp4Matrix(packed, scale[:, :1], 1.0),
        lambda: Nvfp4Matrix(packed, scale.astype(np.float32), 1.0),
        lambda: Nvfp4Matrix(packed.astype(np.int8), scale, 1.0),
        lambda: Nvfp4Matrix(packed, scale, 0.1),  # no float32 value
        lambda: Fp8Matrix(packed, np.asarray(1, np.float32)),
        lambda: Fp8Matrix(packed.view(E4M3), np.ones((3, 1), np.float32)),
        lambda: Fp8Matrix(packed.view(E4M3), np.asarray(1.0)),
        lambda: DenseMatrix(packed),
        lambda: DenseMatrix(np.zeros(3, np.float32)),
        lambda: DenseMatrix(np.zeros((1, 1), np.float32)).dequantize(np.float16),
    ):
        with pytest.raises(ContractError):
            bad()


def test_an_expert_stack_reads_one_matrix_at_a_time() -> None:
    read: list[int] = []

    def matrix(expert: int) -> DenseMatrix:
        read.append(expert)
        return DenseMatrix(np.full((2, 3), expert, np.float32))

    stack = ExpertStack((4, 2, 3), matrix)
    assert len(stack) == 4 and read == []
    assert stack.matrix(2).dequantize()[0, 0] == 2 and read == [2]
    for expert in (-1, 4):
        with pytest.raises(ContractError, match="expert"):
            stack.matrix(expert)
