"""NVFP4 and FP8 encoding: nearest values given the scales, against a search over all values (oracle)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weights.small_models import BF16, CODES, E4M3, decode_by_hand, encode_by_search
from trtllm_replayssm.builders import quantize_encode
from trtllm_replayssm.builders.quantize_encode import (
    absolute_maximum,
    encode_fp8,
    encode_nvfp4,
    fp8_scale,
    nvfp4_scale_2,
)
from trtllm_replayssm.errors import ContractError

E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float64)
E4M3_FINITE = np.unique(E4M3_VALUES[np.isfinite(E4M3_VALUES)])


def check_against_search(values: Any) -> None:
    scale_2 = nvfp4_scale_2(absolute_maximum(values))
    packed, scales = encode_nvfp4(values, scale_2)
    expected_packed, expected_scales, expected_scale_2 = encode_by_search(values.astype(np.float64))
    assert scale_2 == expected_scale_2
    np.testing.assert_array_equal(scales.view(np.uint8), expected_scales.view(np.uint8))
    np.testing.assert_array_equal(packed, expected_packed)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_equal_the_search(dtype: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.uniform(-6, 2, (9, 1)))  # blocks of very different size
    check_against_search((rng.standard_normal((9, 64)) * spread).astype(dtype))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=32, max_size=32))
def test_bytes_equal_the_search_for_any_values(numbers: list[float]) -> None:
    values = np.asarray(numbers, np.float32).reshape(1, 32)
    if np.abs(values).max() > 1e-30:  # below, the multiplier is held at its smallest value
        check_against_search(values)


def test_a_tie_goes_to_the_even_code() -> None:
    halfway = (CODES[:7] + CODES[1:8]) / 2
    values = np.array([[*halfway, *-halfway, 6, 6]], np.float32) * 448  # scale_2 = 1, block scale = 448
    packed, scales = encode_nvfp4(values, nvfp4_scale_2(absolute_maximum(values)))
    assert float(scales[0, 0]) == 448.0
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
    np.testing.assert_array_equal(codes, [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 7, 7])


def test_no_other_code_is_nearer() -> None:
    values = np.random.default_rng(7).standard_normal((8, 256)).astype(np.float32)
    scale_2 = nvfp4_scale_2(absolute_maximum(values))
    packed, scales = encode_nvfp4(values, scale_2)
    step = np.repeat(scales.astype(np.float64) * float(scale_2), 16, axis=1)
    distances = np.abs(values.astype(np.float64)[..., None] - step[..., None] * CODES)
    got = np.abs(values - decode_by_hand(packed, scales, float(scale_2)))
    # The float32 quotient is off by two roundings of 2^-24: it may only pick the other side of a tie that close.
    assert (got - distances.min(axis=-1) <= np.abs(values) * 2.0**-22).all()
    assert (got == distances.min(axis=-1)).mean() > 0.999


@pytest.mark.parametrize("fill", [0.0, 1e-30, 3e38, 2.0**-133])
def test_d05_scales_stay_finite_and_are_not_zero(fill: float) -> None:
    values = np.ones((2, 48), np.float32)
    values[0, 16:32] = 0
    values[1, 16:32] = fill
    values[1, 40] = -fill
    scale_2 = nvfp4_scale_2(absolute_maximum(values))
    packed, scales = encode_nvfp4(values, scale_2)
    wide = scales.astype(np.float64)
    assert np.isfinite(scale_2) and scale_2 > 0 and np.isfinite(wide).all() and (wide > 0).all()
    assert wide[0, 1] == 1 and not packed[0, 8:16].any()
    assert np.isfinite(decode_by_hand(packed, scales, float(scale_2))).all()


def test_d05_matrices_of_zeros_and_of_tiny_values() -> None:
    zeros = np.zeros((2, 16), np.float32)
    assert nvfp4_scale_2(absolute_maximum(zeros)) == 1 and fp8_scale(absolute_maximum(zeros)) == 1
    packed, scales = encode_nvfp4(zeros, np.float32(1))
    assert not packed.any() and (scales.astype(np.float32) == 1).all()
    tiny = np.full((1, 16), 2.0**-126, np.float32)
    scale_2 = nvfp4_scale_2(absolute_maximum(tiny))
    assert scale_2 == fp8_scale(absolute_maximum(tiny)) == np.float32(2.0**-117)
    assert (decode_by_hand(*encode_nvfp4(tiny, scale_2), float(scale_2)) == tiny).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_d05_nan_and_infinity_are_refused(bad: float, dtype: Any) -> None:
    values = np.ones((3, 16), dtype)
    values[2, 5] = bad
    with pytest.raises(ContractError, match="NaN or infinity"):
        absolute_maximum(values)


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_fp8_is_the_nearest_value(dtype: Any) -> None:
    rng = np.random.default_rng(8)
    values = (rng.standard_normal((20, 40)) * np.exp(rng.uniform(-8, 2, (20, 1)))).astype(dtype)
    scale = fp8_scale(absolute_maximum(values))
    assert scale == np.float32(np.float32(np.abs(values).max()) / np.float32(448))
    got = encode_fp8(values, scale).astype(np.float64) * float(scale)
    wide = values.astype(np.float64)
    nearest = np.abs(wide[..., None] - E4M3_FINITE * float(scale)).min(axis=-1)
    np.testing.assert_array_equal(np.abs(got - wide), nearest)


def test_fp8_saturates_and_takes_the_even_code_on_a_tie() -> None:
    values = np.array([[1e9, -1e9, 1.0625, 1.1875, 464.0, 2.0**-10]], np.float32)
    got = encode_fp8(values, np.float32(1)).astype(np.float64)
    np.testing.assert_array_equal(got, [[448, -448, 1.0, 1.25, 448, 0]])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(9).standard_normal((7, 32)).astype(BF16)
    scale = np.float32(0.01)
    whole = *encode_nvfp4(values, scale), encode_fp8(values, scale), absolute_maximum(values)
    monkeypatch.setattr(quantize_encode, "_CHUNK_ELEMS", 70)  # two rows at a time, the last alone
    parts = *encode_nvfp4(values, scale), encode_fp8(values, scale), absolute_maximum(values)
    for one, other in zip(whole, parts, strict=True):
        assert one.tobytes() == other.tobytes()


def test_columns_must_fill_blocks() -> None:
    with pytest.raises(ContractError, match="multiple of 16"):
        encode_nvfp4(np.ones((2, 24), np.float32), np.float32(1))
