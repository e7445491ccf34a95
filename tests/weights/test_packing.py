"""Packed matrices read back lane by lane, as the kernels' operands are defined, give the checkpoint's values exactly.

Oracle O1 written a second time: the reader below follows kernels/experts/formats.cuh (rotations, masks, factors), not
the packer, and multiplies in float64.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.weights.matrix import DenseMatrix, Fp8Matrix, Matrix, MatrixFormat, Nvfp4Matrix
from trtllm_replayssm.weights.packing import BLOCK_COLUMNS, GROUP_TILES, TILE_ROWS, PackedMatrix, pack

E4M3 = ml_dtypes.float8_e4m3fn
TURNS = ((0, 0), (0, 4), (0, -6), (1, 0), (1, 6), (1, -4), (2, 6), (2, -4))  # below 0: a shift to the left


def bfloat16(bits: Any) -> Any:
    return np.asarray(bits, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def turned(word: Any, bits: int) -> Any:
    if bits < 0:
        return word << np.uint32(-bits)
    word = word.astype(np.uint64)
    return (word >> np.uint64(bits) | word << np.uint64(32 - bits)).astype(np.uint32)


def tiles_of(grouped: Any, steps: int) -> Any:
    """[groups, blocks, steps x tiles x bytes] -> [tiles, blocks, steps x bytes]."""
    groups, blocks, _ = grouped.shape
    split = grouped.reshape(groups, blocks, steps, GROUP_TILES, -1).transpose(0, 3, 1, 2, 4)
    return np.ascontiguousarray(split).reshape(groups * GROUP_TILES, blocks, -1)


def nvfp4_operands(packed: PackedMatrix) -> Any:
    """[tiles, blocks, half, lane, instruction, operand register, element] of the weights, the row factor excepted."""
    data = tiles_of(packed.data, 1)
    tiles, blocks, _ = data.shape
    words = data.reshape(tiles, blocks, 2, 32, 2, 8).view(np.uint32)  # [..., sub-step, word]
    rest = words[..., 0] & np.uint32(0x60306030) | words[..., 1] << np.uint32(2) & np.uint32(0x9FCF9FCF)
    sources = (words[..., 0], words[..., 1], rest)
    registers = np.stack([turned(sources[source], turn) & np.uint32(0x81C081C0) for source, turn in TURNS], axis=-1)
    codes = np.stack([bfloat16(registers & 0xFFFF), bfloat16(registers >> 16)], axis=-1) * 2.0**126
    assert packed.block_scale is not None
    codes_of_scales = tiles_of(packed.block_scale, 1).reshape(tiles, blocks, 32, 2, 2)  # [..., row, half]
    scales = codes_of_scales.view(E4M3).astype(np.float64)
    by_register = scales[:, :, :, [0, 1, 0, 1, 0, 1, 0, 1], :]
    product = codes * np.moveaxis(by_register, -1, 2)[:, :, :, :, None, :, None]
    return product.reshape(tiles, blocks, 2, 32, 4, 4, 2)


def fp8_operands(packed: PackedMatrix) -> Any:
    data = tiles_of(packed.data, 2)
    tiles, blocks, _ = data.shape
    words = data.reshape(tiles, blocks, 2, 2, 32, 2, 2, 4).view(E4M3).astype(np.float64)
    # axes: half, piece, lane, instruction, row, byte; a register of a row is bytes 1 and 3, then 0 and 2
    pairs = words[..., [[1, 3], [0, 2]]]
    ordered = pairs.transpose(0, 1, 2, 4, 3, 5, 7, 6, 8)  # half, lane, piece, instruction, pair, row, element
    return ordered.reshape(tiles, blocks, 2, 32, 4, 4, 2)


def bfloat16_operands(packed: PackedMatrix) -> Any:
    data = tiles_of(packed.data, 2)
    tiles, blocks, _ = data.shape
    values = bfloat16(data.view(np.uint16)).reshape(tiles, blocks, 2, 4, 32, 4, 2)
    return values.transpose(0, 1, 2, 4, 3, 5, 6)


def read_back(packed: PackedMatrix, parts: int) -> list[Any]:
    """The matrices [rows, columns] that the operands stand for, padding included, times their factors."""
    read = {MatrixFormat.NVFP4: nvfp4_operands, MatrixFormat.FP8: fp8_operands, MatrixFormat.BF16: bfloat16_operands}
    operands = read[packed.format](packed)
    tiles, blocks = operands.shape[:2]
    fragment = np.zeros((tiles, TILE_ROWS, blocks * BLOCK_COLUMNS))
    for lane in range(32):
        g, c = divmod(lane, 4)
        for register in range(4):
            for half in range(2):
                for instruction in range(4):
                    first = half * 64 + c * 16 + instruction * 4 + register // 2 * 2
                    columns = (np.arange(blocks) * BLOCK_COLUMNS + first)[:, None] + np.arange(2)
                    values = operands[:, :, half, lane, instruction, register]
                    fragment[:, g + 8 * (register % 2), columns.reshape(-1)] = values.reshape(tiles, -1)
    if parts == 1:
        rows = [fragment.reshape(tiles, 2, 8, -1).transpose(0, 2, 1, 3).reshape(tiles * TILE_ROWS, -1)]
    else:
        rows = [fragment[:, 8 * part : 8 * part + 8].reshape(tiles * 8, -1) for part in range(2)]
    factors = np.broadcast_to(packed.factor.astype(np.float64), (parts, packed.factor.shape[1]))
    return [values[: packed.rows] * factor[:, None] for values, factor in zip(rows, factors, strict=True)]


def random_matrix(kind: str, rows: int, columns: int, seed: int) -> Matrix:
    rng = np.random.default_rng(seed)
    if kind == "nvfp4":
        scales = rng.integers(0, 0x7F, (rows, columns // 16), dtype=np.uint8).view(E4M3)
        codes = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        return Nvfp4Matrix(codes, scales, float(np.float32(rng.uniform(1e-4, 1))))
    values = rng.standard_normal((rows, columns)) * 30
    if kind == "fp8":
        return Fp8Matrix(values.astype(E4M3), np.asarray(rng.uniform(0.1, 1, (rows, 1)), dtype=np.float32))
    return DenseMatrix(values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize(
    ("rows", "columns", "parts"), [(32, 128, 1), (48, 272, 1), (40, 400, 2), (8, 16, 2), (5, 64, 1)]
)
def test_operands_are_the_checkpoints_values(kind: str, rows: int, columns: int, parts: int) -> None:
    matrices = tuple(random_matrix(kind, rows, columns, seed) for seed in range(parts))
    packed = pack(matrices)
    assert (packed.rows, packed.columns, packed.factor.shape[0]) == (rows, columns, parts)
    for got, matrix in zip(read_back(packed, parts), matrices, strict=True):
        assert np.array_equal(got[:, :columns], matrix.dequantize(np.float64))
        assert not got[:, columns:].any()


def test_every_code_times_every_scale_is_exact_in_bfloat16() -> None:
    """What the kernel multiplies in bfloat16: a code times 2^-126 and a scale times 2^119."""
    codes = np.arange(16)
    raw_codes = bfloat16((codes & 8) << 12 | (codes & 7) << 6)
    scales = np.arange(0x7F)
    raw_scales = bfloat16(scales << 4) * 2.0**120
    assert np.array_equal(raw_scales, scales.astype(np.uint8).view(E4M3).astype(np.float64))
    products = raw_codes[:, None] * (raw_scales * 2.0**119)
    assert np.array_equal(products, products.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64))
    smallest = np.abs(products[products != 0]).min()
    assert smallest >= 2.0**-126, "no product is subnormal"


def test_full_precision_matrices_become_bfloat16() -> None:
    values = np.random.default_rng(3).standard_normal((16, 24)).astype(np.float32)
    (got,) = read_back(pack((DenseMatrix(values),)), 1)
    assert np.array_equal(got[:, :24], values.astype(ml_dtypes.bfloat16).astype(np.float64))


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ContractError, match="parts: expected nvfp4"):
        pack((random_matrix("nvfp4", 16, 32, 0), random_matrix("nvfp4", 16, 48, 0)))
    with pytest.raises(ContractError, match="columns: expected a multiple of 8, got 12"):
        pack((DenseMatrix(np.zeros((16, 12), np.float32)),))
    negative = Nvfp4Matrix(np.zeros((16, 8), np.uint8), np.full((16, 1), -1.0).astype(E4M3), 1.0)
    with pytest.raises(ContractError, match="block_scale: expected finite scales that are not negative"):
        pack((negative,))
