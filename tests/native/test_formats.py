"""The native arithmetic of the state formats and of the random words, bit for bit against the specification.

The same source is compiled for the host by g++ and, where there are nvcc and a GPU, for the device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native import harness
from trtllm_replayssm.spec import formats
from trtllm_replayssm.spec.formats import E2M1, E4M3, FLOAT16, Grid
from trtllm_replayssm.spec.philox import Domain, philox4x32, state_words

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).resolve().parent / "formats_shim.cu"
GRIDS = [FLOAT16, E4M3, E2M1]
PLAIN_E4M3 = 3  # the shim's fourth way to round: without the instruction
HOST = ["g++", "-xc++", "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
DEVICE = ["nvcc", "-std=c++17", "-arch=native", "-Xcompiler=-fPIC"]


def compiler(name: str) -> list[str]:
    if name == "host":
        if shutil.which("g++") is None:
            pytest.skip("no g++")
        return [*HOST, "-fPIC"]
    if shutil.which("nvcc") is None or (harness.unavailable() or "").startswith(("torch", "no CUDA")):
        pytest.skip("no nvcc or no GPU")
    return DEVICE


@pytest.fixture(scope="module", params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def shim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    binary = tmp_path_factory.mktemp("shim") / f"{request.param}.so"
    command = [*compiler(request.param), "-shared", f"-I{ROOT / 'plugins'}", str(SHIM), "-o", str(binary)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(binary))


def pointer(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def grid_values(grid: Grid) -> np.ndarray[Any, Any]:
    """Every finite magnitude of a grid, ascending, so that the index is the code."""
    step = 2.0 ** (grid.min_exponent - grid.mantissa_bits)
    values, value = [], 0.0
    while value <= grid.largest:
        values.append(value)
        _, exponent = np.frexp(value)
        value += step if value == 0 else 2.0 ** max(int(exponent) - 1 - grid.mantissa_bits, np.log2(step))
    return np.array(values)


def sample(grid: Grid) -> np.ndarray[Any, Any]:
    """Every code and midpoint, their float32 neighbours, a large sample of bit patterns, the special ones."""
    rng = np.random.default_rng(5)
    values = grid_values(grid)
    marks = np.concatenate([values, (values[1:] + values[:-1]) / 2, [grid.largest * 1.01]]).astype(np.float32)
    near = np.concatenate([marks, np.nextafter(marks, np.float32(np.inf)), np.nextafter(marks, np.float32(0))])
    bits = rng.integers(0, 2**32, 300_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scaled = (rng.standard_normal(200_000) * 2.0 ** rng.uniform(-30, 12, 200_000)).astype(np.float32)
    special = np.array([0.0, np.inf, 1e-45, 1.1754944e-38, 3.4e38], np.float32)
    x = np.concatenate([near, bits, scaled, special])
    return np.ascontiguousarray(np.concatenate([x, -x])[~np.isnan(np.concatenate([x, -x]))])


def code_values(grid: Grid, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The numbers codes mean; the sign is the bit above the largest code's bits."""
    values = grid_values(grid)
    sign_bit = {FLOAT16: 15, E4M3: 7, E2M1: 3}[grid]
    magnitudes = values[codes & ((1 << sign_bit) - 1)]
    return np.asarray(np.where(codes >> sign_bit & 1, -magnitudes, magnitudes))


def same(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert np.array_equal(got, expected)
    assert np.array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("way", [0, 1, 2, PLAIN_E4M3])
def test_rounding_to_nearest_is_the_specifications(shim: ctypes.CDLL, way: int) -> None:
    grid = GRIDS[way % 3 if way < PLAIN_E4M3 else 1]
    x = sample(grid)
    codes = np.zeros(x.size, np.uint16)
    shim.shim_nearest(way, pointer(x), pointer(codes), ctypes.c_size_t(x.size))
    same(code_values(grid, codes), formats.round_to_grid(x, grid))


@pytest.mark.parametrize("way", [0, 1, 2])
def test_stochastic_rounding_is_the_specifications(shim: ctypes.CDLL, way: int) -> None:
    grid, x = GRIDS[way], sample(GRIDS[way])
    rng = np.random.default_rng(6)
    words = rng.integers(0, 2**32, x.size, dtype=np.uint64).astype(np.uint32)
    words[::7] = 0
    words[1::7] = 2**32 - 1
    # A third of the words at the border of the decision: floor(fraction * 2^32) and the word before it.
    magnitude = np.minimum(np.abs(x.astype(np.float64)), grid.largest)
    _, exponent = np.frexp(magnitude)
    scaled = magnitude / np.ldexp(1.0, np.maximum(exponent - 1, grid.min_exponent) - grid.mantissa_bits)
    border = np.floor((scaled - np.floor(scaled)) * 2.0**32).astype(np.uint64)
    words[2::7] = border[2::7].astype(np.uint32)
    words[3::7] = (np.maximum(border, 1) - 1)[3::7].astype(np.uint32)
    codes = np.zeros(x.size, np.uint16)
    shim.shim_stochastic(way, pointer(x), pointer(words), pointer(codes), ctypes.c_size_t(x.size))
    same(code_values(grid, codes), formats.round_to_grid(x, grid, words))


def test_nan_stays_nan_or_becomes_the_largest_number(shim: ctypes.CDLL) -> None:
    x = np.array([np.nan, -np.nan], np.float32)
    words = np.zeros(2, np.uint32)
    for way, expected in ((0, 0x7E00), (1, 0x7F), (2, 7), (PLAIN_E4M3, 0x7F)):
        codes = np.zeros(2, np.uint16)
        shim.shim_nearest(way, pointer(x), pointer(codes), ctypes.c_size_t(2))
        mask = 0x7FFF if way == 0 else 0x7F
        assert (codes & mask == expected).all(), way
        if way < PLAIN_E4M3:
            shim.shim_stochastic(way, pointer(x), pointer(words), pointer(codes), ctypes.c_size_t(2))
            assert (codes & mask == expected).all(), way


@pytest.mark.parametrize("seed", [0, 1, 0x123456789ABCDEF0, 2**64 - 1])
def test_random_words_are_the_specifications(shim: ctypes.CDLL, seed: int) -> None:
    layer, head, position, elems = 65535, 17, 2**31 - 1, 4096
    words, complements = np.zeros(elems, np.uint32), np.zeros(elems, np.uint32)
    shim.shim_words(
        ctypes.c_uint64(seed), ctypes.c_uint32(layer << 16 | head), ctypes.c_uint32(position), pointer(words),
        pointer(complements), ctypes.c_size_t(elems // 4),
    )  # fmt: skip
    assert np.array_equal(~complements, words)
    expected = state_words(seed, layer, head + 1, elems, position)[head]
    assert np.array_equal(words, expected)
    counter = np.array([3, layer << 16 | head, position, Domain.STATE], np.uint32)
    assert np.array_equal(words[12:16], philox4x32(counter, seed))


def test_inverses_of_scales_are_correctly_rounded(shim: ctypes.CDLL) -> None:
    bits = np.random.default_rng(8).integers(0x00800000, 0x7E800000, 400_000, dtype=np.uint32)
    edges = np.array([2.0**e for e in range(-126, 126)], np.float32)
    near = np.concatenate([np.nextafter(edges, np.float32(np.inf)), np.nextafter(edges[1:], np.float32(0))])
    x = np.concatenate([bits.view(np.float32), edges, near])
    result = np.zeros_like(x)
    shim.shim_invert(pointer(x), pointer(result), ctypes.c_size_t(x.size))
    assert np.array_equal(result, np.float32(1.0) / x)


def test_codes_mean_the_numbers_of_the_grids(shim: ctypes.CDLL) -> None:
    wide, narrow = np.zeros(256, np.float32), np.zeros(256, np.float32)
    shim.shim_values(pointer(wide), pointer(narrow))
    codes = np.arange(256)
    finite = (codes & 0x7F) != 0x7F
    assert np.isnan(wide[~finite]).all()
    same(wide[finite], code_values(E4M3, codes[finite]).astype(np.float32))
    same(narrow[:16], code_values(E2M1, codes[:16]).astype(np.float32))


@pytest.mark.parametrize("head_amax", [0.0, 1e-42, 3e-38, 1e-35, 1e-30, 1e-17, 0.37, 5.0, 3e30, 3.4e38])
def test_scales_are_the_specifications(shim: ctypes.CDLL, head_amax: float) -> None:
    rng = np.random.default_rng(9)
    amax = (head_amax * rng.uniform(0, 1, 4096) ** 8).astype(np.float32)
    amax[:3] = (0.0, head_amax, head_amax * 2.0**-20)
    amax = np.minimum(amax, np.float32(head_amax))
    state = np.zeros((1, amax.size, 16), np.float32)
    state[0, :, 3] = -amax
    block_scale, head_scale = formats.nvfp4_scales(state)
    fp8, head = np.zeros_like(amax), np.zeros_like(amax)
    block = np.zeros(amax.size, np.uint8)
    shim.shim_scales(
        pointer(amax), ctypes.c_float(head_scale[0]), pointer(fp8), pointer(head), pointer(block),
        ctypes.c_size_t(amax.size),
    )  # fmt: skip
    assert np.array_equal(fp8, formats.fp8_scales(state)[0, :, 0])
    assert head[1] == head_scale[0]
    assert np.array_equal(code_values(E4M3, block.astype(np.int64)), block_scale[0, :, 0])
