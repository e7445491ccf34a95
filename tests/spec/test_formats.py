"""State formats: every code and midpoint against ml_dtypes, scales of strange blocks, stochastic rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trtllm_replayssm.dtypes import E2M1_VALUES, FP4_BLOCK, FP8_BLOCK, FP16_MAX, Rounding, StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.spec import formats
from trtllm_replayssm.spec.formats import E2M1, E4M3, FLOAT16, encode, fp8_scales, nvfp4_scales, round_to_grid
from trtllm_replayssm.spec.philox import state_words

LOW = [StateFormat.FP8, StateFormat.NVFP4]


def codes(dtype: type, bits: int) -> np.ndarray:
    """All finite values of a small float type, sorted, without the negative zero."""
    raw = np.arange(2**bits, dtype=np.uint16 if bits == 16 else np.uint8).view(dtype).astype(np.float64)
    return np.unique(raw[np.isfinite(raw)])


GRIDS = [
    (FLOAT16, np.float16, codes(np.float16, 16)),
    (E4M3, ml_dtypes.float8_e4m3fn, codes(ml_dtypes.float8_e4m3fn, 8)),
    (E2M1, ml_dtypes.float4_e2m1fn, np.array(sorted({s * v for v in E2M1_VALUES for s in (-1.0, 1.0)}))),
]


@pytest.mark.parametrize(("grid", "dtype", "values"), GRIDS, ids=["float16", "e4m3", "e2m1"])
def test_nearest_rounding_equals_the_cast_at_every_code_midpoint_and_beside_them(
    grid: formats.Grid, dtype: type, values: np.ndarray
) -> None:
    assert values.max() == grid.largest
    assert (round_to_grid(values.astype(np.float32), grid) == values).all()
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)  # exact in float32
    above, below = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))
    probes = np.concatenate([middle, above, below])
    with np.errstate(over="ignore"):
        cast = probes.astype(dtype).astype(np.float64)
    assert (round_to_grid(probes, grid) == cast).all()
    rounded = round_to_grid(np.float32([-0.0, 0.0]), grid)
    assert list(np.signbit(rounded)) == [True, False]


@pytest.mark.parametrize(("grid", "dtype", "values"), GRIDS, ids=["float16", "e4m3", "e2m1"])
@pytest.mark.parametrize("random", [False, True])
def test_values_beyond_the_grid_saturate(grid: formats.Grid, dtype: type, values: np.ndarray, random: bool) -> None:
    x = np.float32([grid.largest * 1.5, -grid.largest * 1.5, 3e38, np.inf, -np.inf])
    words = np.zeros(5, np.uint32) if random else None
    assert (round_to_grid(x, grid, words) == np.sign(x) * grid.largest).all()
    assert dtype(grid.largest) == grid.largest and values[-1] == grid.largest


def test_nan_stays_nan_where_the_grid_has_one() -> None:
    x = np.float32([np.nan, 1.0])
    for words in (None, np.zeros(2, np.uint32)):
        assert np.isnan(round_to_grid(x, E4M3, words)[0]) and np.isnan(round_to_grid(x, FLOAT16, words)[0])
        assert round_to_grid(x, E2M1, words)[0] == 6.0


@pytest.mark.parametrize(("grid", "dtype", "values"), GRIDS, ids=["float16", "e4m3", "e2m1"])
def test_stochastic_rounding_takes_a_neighbour_and_rounds_up_exactly_below_the_fraction(
    grid: formats.Grid, dtype: type, values: np.ndarray
) -> None:
    positive = values[(values >= 0) & (values < grid.largest)][:: max(1, len(values) // 500)]
    upper = np.array([values[values > v].min() for v in positive])
    fraction = np.float32(0.3125)
    x = (positive + (upper - positive) * float(fraction)).astype(np.float32)
    exact = (x.astype(np.float64) - positive) / (upper - positive)
    threshold = np.floor(exact * 2.0**32)
    for sign in (1.0, -1.0):
        below = round_to_grid(sign * x, grid, (threshold - 1).astype(np.uint32))
        at = round_to_grid(sign * x, grid, threshold.astype(np.uint32))
        assert (below == sign * upper).all() and (at == sign * positive).all()
    assert (round_to_grid(values.astype(np.float32), grid, np.zeros(len(values), np.uint32)) == values).all()
    assert dtype(0) == 0


def test_stochastic_rounding_is_unbiased_and_nearest_is_not() -> None:
    """10,000 flushes of values a quarter and half a step above a code: the mean is within 4.9 sigma (error 1e-6)."""
    flushes, elems = 10_000, 8
    step = 2.0**-3  # E4M3 between 1 and 2; scale 1 comes from the block's largest value, 448
    x = np.full((1, 1, elems), 1.0 + step * 0.25, np.float32)
    x[..., 4:] = 1.0 + step * 0.5
    x[..., -1] = 448.0
    total, ups = np.zeros(elems), np.zeros(elems)
    for position in range(flushes):
        stored = encode(x, StateFormat.FP8, Rounding.STOCHASTIC, state_words(5, 1, 1, elems, position))
        value = stored.decode()[0, 0].astype(np.float64)
        total += value - x[0, 0]
        ups += value > x[0, 0]
    sigma = step * np.sqrt(np.array([0.25 * 0.75] * 4 + [0.25] * 4) / flushes)
    assert (np.abs(total / flushes)[:-1] < 4.9 * sigma[:-1]).all(), total / flushes / sigma
    assert total[-1] == 0.0
    assert ((ups[:-1] > 0.2 * flushes) & (ups[:-1] < 0.6 * flushes)).all()
    nearest = encode(x, StateFormat.FP8).decode()
    assert (np.abs(nearest - x)[0, 0, :-1] >= step * 0.25).all()


@pytest.mark.parametrize("elems", [16, 64, 96, 128, 256])
def test_fp8_scales_cover_128_elements_and_the_last_block_may_be_short(elems: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, elems)).astype(np.float32)
    scale = fp8_scales(x)
    assert scale.shape == (2, 3, -(-elems // FP8_BLOCK)) and scale.dtype == np.float32
    for b in range(scale.shape[-1]):
        part = slice(b * FP8_BLOCK, (b + 1) * FP8_BLOCK)
        own = np.abs(x[..., part]).max(-1, keepdims=True) / np.float32(448)
        assert (scale[..., b : b + 1] == own).all()
        want = (x[..., part] * (np.float32(1) / own)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * own
        assert (encode(x, StateFormat.FP8).decode()[..., part] == want).all()


@pytest.mark.parametrize("elems", [16, 64, 96, 128, 256])
def test_nvfp4_has_one_e4m3_scale_per_16_and_one_float32_scale_per_head(elems: int) -> None:
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(2, 3, elems)) * np.exp(rng.normal(size=(2, 3, 1)))).astype(np.float32)
    block_scale, head_scale = nvfp4_scales(x)
    assert block_scale.shape == (2, 3, elems // FP4_BLOCK) and head_scale.shape == (2,)
    stored = encode(x, StateFormat.NVFP4)
    for h in range(2):
        assert head_scale[h] == np.abs(x[h]).max() / np.float32(6 * 448)
        for p in range(3):
            for b in range(elems // FP4_BLOCK):
                block = x[h, p, b * FP4_BLOCK : (b + 1) * FP4_BLOCK]
                target = np.abs(block).max() * (np.float32(1) / (np.float32(6) * head_scale[h]))
                want = np.float32(max(float(target.astype(ml_dtypes.float8_e4m3fn)), 2.0**-9))
                assert block_scale[h, p, b] == want
                scale = want * head_scale[h]
                decoded = (block * (np.float32(1) / scale)).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
                assert (stored.decode()[h, p, b * FP4_BLOCK : (b + 1) * FP4_BLOCK] == decoded).all()


@pytest.mark.parametrize("fmt", [StateFormat.FLOAT16, *LOW])
@pytest.mark.parametrize("rounding", Rounding)
def test_the_error_is_below_one_step_of_the_format(fmt: StateFormat, rounding: Rounding) -> None:
    x = np.random.default_rng(3).normal(size=(4, 5, 96)).astype(np.float32)
    words = state_words(1, 1, 4, 5 * 96, 1)
    error = np.abs(encode(x, fmt, rounding, words).decode() - x)
    half_step = {StateFormat.FLOAT16: 2.0**-11, StateFormat.FP8: 2.0**-4, StateFormat.NVFP4: 0.25}[fmt]
    # relative error of a value, or of its block's largest value divided by 448 (FP8) or by 6 (NVFP4) when it is small
    limit = np.maximum(half_step * np.abs(x), {"float16": 2.0**-25, "fp8": 5.0 / 448 * 2**-10, "nvfp4": 0.2}[fmt.value])
    assert (error <= (1.0 if rounding is Rounding.NEAREST else 2.0) * limit * (1 + 1e-3)).all()
    assert error.max() > 0


@pytest.mark.parametrize("fmt", LOW)
@pytest.mark.parametrize("rounding", Rounding)
def test_strange_blocks_have_finite_scales_that_are_not_zero(fmt: StateFormat, rounding: Rounding) -> None:
    block = FP8_BLOCK if fmt is StateFormat.FP8 else FP4_BLOCK
    x = np.zeros((7, 1, 2 * block), np.float32)
    x[1, 0, 3] = 1e-44  # subnormal
    x[2, 0, 3] = 1e-20
    x[3, 0, 3] = 3e38
    x[4, 0, 3], x[4, 0, 4] = np.nan, 2.0
    x[5, 0, 3], x[5, 0, 4] = np.inf, 2.0
    x[6, 0, 3], x[6, 0, block + 3] = 1e-30, 1.0  # one tiny block beside a normal one
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        stored = encode(x, fmt, rounding, state_words(1, 1, 7, 2 * block, 1))
    scale = stored.block_scale
    assert scale is not None and np.isfinite(scale).all() and (scale > 0).all()
    if stored.head_scale is not None:
        assert np.isfinite(stored.head_scale).all() and (stored.head_scale > 0).all()
    decoded = stored.decode()
    assert (decoded[0] == 0).all()
    assert abs(decoded[1, 0, 3]) <= 2e-38
    assert decoded[2, 0, 3] == pytest.approx(1e-20, rel=1e-6) and decoded[3, 0, 3] == pytest.approx(3e38, rel=1e-6)
    assert decoded[4, 0, 4] == pytest.approx(2.0, rel=1e-6) and decoded[5, 0, 4] == pytest.approx(2.0, rel=1e-6)
    assert np.isnan(decoded[4, 0, 3]) == (fmt is StateFormat.FP8)
    assert decoded[5, 0, 3] == pytest.approx(2.0, rel=1e-6)  # saturates at the largest finite value of its block
    assert (decoded[4:6, 0, 5:] == 0).all() and abs(decoded[6, 0, 3]) < 1e-3
    assert decoded[6, 0, block + 3] == pytest.approx(1.0, rel=1e-6)


def test_float32_is_kept_and_float16_saturates() -> None:
    x = np.float32([[[1.0 + 2**-23, 1e6, -1e6, 65519.0]]])
    assert (encode(x, StateFormat.FLOAT32).decode() == x).all()
    for rounding in Rounding:
        decoded = encode(x, StateFormat.FLOAT16, rounding, np.full((1, 4), 5, np.uint32)).decode()[0, 0]
        assert list(decoded[1:]) == [FP16_MAX, -FP16_MAX, FP16_MAX]


def test_stochastic_rounding_without_words_is_refused() -> None:
    with pytest.raises(ContractError, match="words"):
        encode(np.ones((1, 1, 16)), StateFormat.FP8, Rounding.STOCHASTIC)


@pytest.mark.parametrize("fmt", LOW)
def test_a_decoded_state_is_a_fixed_point(fmt: StateFormat) -> None:
    x = np.random.default_rng(4).normal(size=(3, 4, 128)).astype(np.float32)
    once = encode(x, fmt).decode()
    assert (encode(once, fmt).decode() == once).mean() > 0.99
    assert np.abs(encode(once, fmt).decode() - once).max() < 1e-6
