"""Recorded steps of models with routed experts: the bits of steps launched one by one, with both state caches.

Decoder periods of the two large public models with random weights and fewer experts, so that every kind of layer is in
the recording.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.native import harness
from trtllm_replayssm.config import EVERY_BATCH, PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.random_weights import RandomWeights
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.presets import preset_geometry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

PERIODS = {"nemotron-3-super-120b-a12b": 9, "qwen3.5-122b-a10b": 4}  # layers, from the first on
VOCAB, EXPERTS, WIDEST = 2048, 32, 4


def geometry_of(name: str) -> ModelGeometry:
    whole = preset_geometry(name)
    assert whole.moe is not None
    moe = replace(whole.moe, experts=EXPERTS, top_k=min(whole.moe.top_k, 8))
    return replace(whole, layers=whole.layers[: PERIODS[name]], moe=moe, vocab=VOCAB, mtp_pattern=())


@cache
def weights(name: str) -> RandomWeights:
    return RandomWeights(geometry_of(name), torch.bfloat16, torch.device("cuda"))


def open_session(name: str, *, recorded: bool, conventional: bool) -> TorchSession:
    pool = PoolConfig(slots=4, max_seq_len=128, activation=ActivationDtype.BFLOAT16)
    replay = ReplayConfig(window=8, max_step_tokens=WIDEST)
    device = torch.device("cuda")
    pools = StatePools.allocate(geometry_of(name), replay, pool, conventional=conventional, device=device)
    session = TorchSession(weights(name), pools, cuda_graphs=EVERY_BATCH if recorded else None)
    assert bool(session.recorded.sizes) == recorded, "its experts wait for nothing"
    return session


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("name", PERIODS)
def test_recorded_steps_have_the_bits_of_launched_ones(name: str, conventional: bool) -> None:
    recorded, launched = (open_session(name, recorded=r, conventional=conventional) for r in (True, False))
    rng, slots = np.random.default_rng(3), []
    for session in (recorded, launched):
        slots = [session.allocate(seed=i) for i in range(3)]
        session.prefill([PrefillChunk(s, list(range(5 + 3 * s)), True) for s in slots])
    for _ in range(8):
        counts = [WIDEST, *rng.integers(0, WIDEST + 1, 2)]
        rows = [DecodeRow(s, rng.integers(0, VOCAB, n).tolist()) for s, n in zip(slots, counts, strict=True)]
        rows.insert(int(rng.integers(0, 4)), DecodeRow(-1, []))
        accepted = [int(rng.integers(0, len(row.tokens) + 1)) for row in rows]
        for got, want in zip(recorded.decode(rows), launched.decode(rows), strict=True):
            assert np.isfinite(got).all()
            np.testing.assert_array_equal(got, want)
        recorded.commit(accepted)
        launched.commit(accepted)
    assert [recorded.cursors(s) for s in slots] == [launched.cursors(s) for s in slots]
    assert recorded.graphs.count > 0 == launched.graphs.count
