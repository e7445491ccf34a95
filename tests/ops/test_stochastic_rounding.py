"""Stochastic rounding through the store of a layer: unbiased, and keyed by request, layer, head and position (C15).

Error rates: a mean is compared at four standard errors, so correct code fails one of these tests for 6e-5 of seeds;
the seeds are fixed, so a run either always passes or never does. Words are compared exactly.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import CPU, LAYER, Layer, random_tokens, same
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState
from trtllm_replayssm.ops.reference.flush import store_checkpoints
from trtllm_replayssm.shapes import SsmKind

SHAPE = ssm_shape(SsmKind.MAMBA2, heads=2, groups=1, head_dim=8, state_dim=128)
SIGMAS = 4.0
SR_FORMATS = [StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4]


def stored(
    state: torch.Tensor, fmt: StateFormat, *, seed: int = 1, slot: int = 0, layer: int = LAYER, position: int = 0
) -> torch.Tensor:
    """A state [H, P, N] after one store with stochastic rounding."""
    pool = ReplayLayerState.allocate(SHAPE, ReplayConfig(recurrence=fmt), layer, slot + 1, torch.float32, CPU)
    cursors = CursorTensors.allocate(slot + 1, CPU)
    cursors.seed[slot] = seed
    index = torch.tensor([slot])
    store_checkpoints(pool, cursors, index, state[None], torch.tensor([position]))
    return pool.checkpoint.load(index)[0]


def between(fmt: StateFormat, fraction: float) -> tuple[torch.Tensor, float, float]:
    """A state whose elements all lie `fraction` of the way between two neighbours, which follow; scales are exact."""
    state = torch.zeros(2, 8, 128)
    if fmt is StateFormat.FLOAT16:
        low, high = 1.0, 1.0 + 2.0**-10
    elif fmt is StateFormat.FP8:
        state[..., 0], low, high = 448.0, 16.0, 18.0  # the block's scale is 1
    else:
        low, high = 2.0, 3.0
        state[..., 0::16] = 6.0  # every block's scale product is 1 up to a float32 step
    state[state == 0] = low + fraction * (high - low)
    return state, low, high


@pytest.mark.parametrize("fmt", SR_FORMATS)
@pytest.mark.parametrize("fraction", [0.5, 0.125, 0.9])
def test_c15_the_mean_of_many_draws_is_the_value(fmt: StateFormat, fraction: float) -> None:
    """C15: 10 positions of about 1,900 elements; rounding to nearest misses the mean by the whole fraction."""
    state, low, high = between(fmt, fraction)
    free = (state > low) & (state < high)
    draws = []
    for position in range(10):
        got = stored(state, fmt, position=position)[free]
        up = (got - low) / (high - low)
        assert set(up.round(decimals=3).unique().tolist()) == {0.0, 1.0}
        draws.append(up.round())
    rates = torch.stack(draws).double()
    error = math.sqrt(fraction * (1 - fraction) / rates.numel())
    assert abs(float(rates.mean()) - fraction) <= SIGMAS * error
    assert rates.numel() > 15_000


@pytest.mark.parametrize("fmt", SR_FORMATS)
def test_c15_draws_differ_by_request_layer_and_position_and_never_by_slot(fmt: StateFormat) -> None:
    state, low, high = between(fmt, 0.5)
    free = (state > low) & (state < high)

    def bits(**key: int) -> torch.Tensor:
        return (stored(state, fmt, **key)[free] > (low + high) / 2).double()

    base = bits(seed=1, layer=2, position=3)
    assert torch.equal(bits(seed=1, layer=2, position=3, slot=4), base)
    others = [bits(seed=2, layer=2, position=3), bits(seed=1, layer=3, position=3), bits(seed=1, layer=2, position=4)]
    others += [bits(seed=1 << 32, layer=2, position=3), bits(seed=-1, layer=2, position=3)]
    error = 0.5 / math.sqrt(base.numel())
    for first, second in itertools.combinations([base, *others], 2):
        assert abs(float((first == second).double().mean()) - 0.5) <= SIGMAS * error


def test_c15_draws_differ_by_head() -> None:
    state, low, _ = between(StateFormat.FLOAT16, 0.5)
    got = stored(state, StateFormat.FLOAT16) > low
    agree = float((got[0] == got[1]).double().mean())
    assert abs(agree - 0.5) <= SIGMAS * 0.5 / math.sqrt(got[0].numel())


@pytest.mark.parametrize("kind", list(SsmKind))
def test_c15_a_run_draws_afresh_at_every_flush_and_repeats_with_its_seed(kind: SsmKind) -> None:
    """The same request in another slot gives the same bytes; another request gives others, flush by flush."""
    shape = ssm_shape(kind)
    config = ReplayConfig(window=2, recurrence=StateFormat.FP8)
    layer = Layer(shape, config, 3)
    layer.cursors.seed.copy_(torch.tensor([11, 12, 11]))
    one = random_tokens(shape, 1, 9)
    tokens = one.rows([0, 0, 0])
    different = 0
    for t in range(9):
        layer.step(tokens.span(t, t + 1), [0, 1, 2])
        assert same(layer.checkpoints(0), layer.checkpoints(2))
        different += not same(layer.checkpoints(0), layer.checkpoints(1))
    assert different == 7  # the first flush comes before the third token, and every checkpoint since then differs


def test_rounding_to_nearest_ignores_the_request() -> None:
    state = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0))
    outcomes = []
    for seed in (1, 2):
        config = ReplayConfig(recurrence=StateFormat.FP8, recurrence_rounding=Rounding.NEAREST)
        pool = ReplayLayerState.allocate(SHAPE, config, LAYER, 1, torch.float32, CPU)
        cursors = CursorTensors.allocate(1, CPU)
        cursors.seed[0] = seed
        store_checkpoints(pool, cursors, torch.tensor([0]), state[None], torch.tensor([0]))
        outcomes.append(pool.checkpoint.load(torch.tensor([0])))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not np.array_equal(outcomes[0][0].numpy(), stored(state, StateFormat.FP8).numpy())
