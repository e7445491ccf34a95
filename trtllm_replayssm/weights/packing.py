"""Matrices in the order in which the native kernels of the routed experts read them: bytes and bits move, values stay.

A packed matrix is groups of eight tiles of 16 rows by blocks of 128 columns, both padded with zeros. Within a tile's
columns each of the 32 lanes (g = lane // 4, c = lane % 4) owns, of each 64 columns, the 16 from 16 c on of fragment
rows g and g + 8. Fragment row g is row 2 g of the tile and g + 8 row 2 g + 1; of a gate and an up matrix packed as one,
row g is gate row 8 tile + g and g + 8 the up row of that number. plugins/kernels/experts/README.md draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.weights.matrix import DenseMatrix, Fp8Matrix, Matrix, MatrixFormat, Nvfp4Matrix

TILE_ROWS = 16
GROUP_TILES = 8
GROUP_ROWS = GROUP_TILES * TILE_ROWS
BLOCK_COLUMNS = 128
_LANES = 32

# Where a pair of bfloat16 lies in the two words that hold 16 codes: (word, rotation to the right that brings it into
# place; below 0: shift to the left). Word 2 is composed: the bits of _FROM_FIRST from the first word, the others from
# the second, shifted to the left by _SECOND_SHIFT.
_PLACES = ((0, 0), (0, 4), (0, -6), (1, 0), (1, 6), (1, -4), (2, 6), (2, -4))
_FROM_FIRST = 0x60306030
_SECOND_SHIFT = 2
_CODE_BITS = (6, 7, 8, 15)  # of a bfloat16, for the bits of an E2M1 code


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """data: [groups, blocks, bytes] uint8; block_scale: [groups, blocks, 1024] E4M3 bytes as uint8 (NVFP4) or None;
    factor: [parts, 1 | rows] float32; rows: of one part; columns: before padding.
    """

    format: MatrixFormat
    rows: int
    columns: int
    data: NDArray[np.uint8]
    block_scale: NDArray[np.uint8] | None
    factor: NDArray[np.float32]


def packed_sizes(
    fmt: MatrixFormat, rows: int, columns: int, parts: int
) -> tuple[tuple[int, int, int], tuple[int, int, int] | None, tuple[int, int]]:
    """Extents of `PackedMatrix.data` (bytes), `block_scale` and `factor` for matrices of `fmt` [rows, columns]."""
    groups, blocks = -(-rows * parts // GROUP_ROWS), -(-columns // BLOCK_COLUMNS)
    elements = GROUP_ROWS * BLOCK_COLUMNS
    if fmt is MatrixFormat.NVFP4:
        return (groups, blocks, elements // 2), (groups, blocks, GROUP_TILES * BLOCK_COLUMNS), (parts, 1)
    if fmt is MatrixFormat.FP8:
        return (groups, blocks, elements), None, (parts, rows)
    return (groups, blocks, 2 * elements), None, (parts, 1)


def pack(parts: tuple[Matrix, ...]) -> PackedMatrix:
    """One matrix [N, K], or gate and up of the same shape and format.

    float32 and float16 matrices become bfloat16, rounded to nearest; the other formats keep every value. Raises
    ContractError when the parts differ, when K is no multiple of 8, or when an NVFP4 scale is negative or not a number.
    """
    first = parts[0]
    rows, columns = first.shape
    for part in parts[1:]:
        if part.shape != first.shape or part.format is not first.format:
            raise _error("parts", f"{first.format.value} {[rows, columns]}", f"{part.format.value} {list(part.shape)}")
    if columns % 8:
        raise _error("columns", "a multiple of 8", columns)
    scale = None
    if isinstance(first, Nvfp4Matrix):
        nvfp4 = [p for p in parts if isinstance(p, Nvfp4Matrix)]
        data = _pack_codes(_fragment_rows([p.packed for p in nvfp4], BLOCK_COLUMNS // 2))
        scale = _pack_scales(_fragment_rows([_checked_scales(p) for p in nvfp4], BLOCK_COLUMNS // FP4_BLOCK))
        factor = np.array([[p.scale_2] for p in nvfp4], dtype=np.float32)
    elif isinstance(first, Fp8Matrix):
        fp8 = [p for p in parts if isinstance(p, Fp8Matrix)]
        data = _pack_bytes(_fragment_rows([p.weight.view(np.uint8) for p in fp8], BLOCK_COLUMNS))
        factor = np.stack([np.broadcast_to(p.scale.reshape(-1), (rows,)) for p in fp8])
    else:
        dense = [p.data.astype(ml_dtypes.bfloat16).view(np.uint16) for p in parts if isinstance(p, DenseMatrix)]
        data = _pack_halves(_fragment_rows(dense, BLOCK_COLUMNS))
        factor = np.ones((len(parts), 1), dtype=np.float32)
    kind = first.format if first.format.quantised else MatrixFormat.BF16
    return PackedMatrix(kind, rows, columns, data, scale, np.ascontiguousarray(factor))


def _fragment_rows(parts: list[NDArray[Any]], block: int) -> NDArray[Any]:
    """[N, n] of each part -> [tiles, 2, 8, blocks, block]: rows in fragment order, whole groups, padded with zeros."""
    rows, width = parts[0].shape
    own = TILE_ROWS // len(parts)  # rows of a part in a tile
    tiles, blocks = -(-rows // (own * GROUP_TILES)) * GROUP_TILES, -(-width // block)
    padded = np.zeros((len(parts), tiles * own, blocks * block), dtype=parts[0].dtype)
    for i, part in enumerate(parts):
        padded[i, :rows, :width] = part
    if len(parts) == 1:  # rows 2 g and 2 g + 1
        ordered: NDArray[Any] = padded.reshape(tiles, 8, 2, blocks, block).transpose(0, 2, 1, 3, 4)
    else:
        ordered = padded.reshape(2, tiles, 8, blocks, block).transpose(1, 0, 2, 3, 4)
    return ordered


def _pack_codes(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[tiles, 2, 8, blocks, 64] bytes of two codes -> [groups, blocks, 8192]."""
    tiles, _, _, blocks, _ = rows.shape
    # axes: tile, upper or lower row, g, block, 64 columns, c, 8 columns, byte
    split = rows.reshape(tiles, 2, 8, blocks, 2, 4, 2, 4)
    lanes = split.transpose(0, 3, 4, 2, 5, 6, 1, 7).reshape(-1, 8)  # eight bytes: four of row g, four of row g + 8
    table = _spread_table()
    words = np.zeros(len(lanes), dtype=np.uint64)
    for byte in range(8):
        words |= table[byte][lanes[:, byte]]
    return _grouped(words.view(np.uint8).reshape(tiles, blocks, 1, -1))


def _grouped(tiles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[tiles, blocks, steps, bytes] -> [groups, blocks, steps x tiles of the group x bytes]: what a step needs lies
    together.
    """
    count, blocks, steps, size = tiles.shape
    split = tiles.reshape(count // GROUP_TILES, GROUP_TILES, blocks, steps, size)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4)).reshape(count // GROUP_TILES, blocks, -1)


def _spread_table() -> NDArray[np.uint64]:
    """[8, 256]: where the bits of byte i of the eight go within the two words."""
    table = np.zeros((8, 256), dtype=np.uint64)
    values = np.arange(256, dtype=np.uint64)
    for byte in range(8):
        lower_row, pair = divmod(byte, 4)
        instruction, second_pair = divmod(pair, 2)
        word, turn = _PLACES[4 * instruction + lower_row + 2 * second_pair]
        for half in range(2):
            for bit, place in enumerate(_CODE_BITS):
                target = (place + 16 * half + turn) % 32
                in_second = word == 1
                if word == 2 and not _FROM_FIRST >> target & 1:
                    in_second, target = True, target - _SECOND_SHIFT
                source = np.uint64(4 * half + bit)
                table[byte] |= ((values >> source) & np.uint64(1)) << np.uint64(target + 32 * in_second)
    return table


def _checked_scales(matrix: Nvfp4Matrix) -> NDArray[np.uint8]:
    codes: NDArray[np.uint8] = matrix.block_scale.view(np.uint8)
    if (codes >= 0x7F).any():
        raise _error("block_scale", "finite scales that are not negative", "other E4M3 codes")
    return codes


def _pack_scales(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[tiles, 2, 8, blocks, 8] -> [groups, blocks, 1024]: a lane has (g, half 0), (g, 1), (g + 8, 0), (g + 8, 1)."""
    tiles, _, _, blocks, _ = rows.shape
    split = rows.reshape(tiles, 2, 8, blocks, 2, 4)
    return _grouped(np.ascontiguousarray(split.transpose(0, 3, 2, 5, 1, 4)).reshape(tiles, blocks, 1, 4 * _LANES))


def _pack_bytes(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[tiles, 2, 8, blocks, 128] E4M3 -> [groups, blocks, 16384]: four columns a word, in the order 2, 0, 3, 1."""
    tiles, _, _, blocks, _ = rows.shape
    # axes: tile, upper or lower row, g, block, 64 columns, c, 8 columns, instruction, column
    split = rows.reshape(tiles, 2, 8, blocks, 2, 4, 2, 2, 4)[..., [2, 0, 3, 1]]
    return _grouped(np.ascontiguousarray(split.transpose(0, 3, 4, 6, 2, 5, 7, 1, 8)).reshape(tiles, blocks, 2, -1))


def _pack_halves(rows: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """[tiles, 2, 8, blocks, 128] bfloat16 bits -> [groups, blocks, 32768]: the operands of an instruction a lane."""
    tiles, _, _, blocks, _ = rows.shape
    # axes: tile, upper or lower row, g, block, 64 columns, c, instruction, pair, column
    split = rows.reshape(tiles, 2, 8, blocks, 2, 4, 4, 2, 2)
    ordered = np.ascontiguousarray(split.transpose(0, 3, 4, 6, 2, 5, 7, 1, 8))
    return _grouped(ordered.view(np.uint8).reshape(tiles, blocks, 2, -1))


def _error(argument: str, expected: object, got: object) -> ContractError:
    return ContractError("pack", argument, expected=expected, got=got)
