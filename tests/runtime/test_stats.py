"""The engine's counters against counts made by hand."""

from __future__ import annotations

import json

import pytest

from tests.runtime.fake_session import geometry
from tests.runtime.harness import bench, scripted
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.runtime.stats import EngineStats
from trtllm_replayssm.runtime.traffic_meter import TrafficMeter
from trtllm_replayssm.spec.traffic import conventional_step_bytes, step_bytes

SHAPE = geometry().ssm
LAYERS = 2  # SSM layers of the fake geometry


def test_counters_of_a_speculative_run_by_hand() -> None:
    machine = scripted(list(range(10, 40)), draft_len=3)  # window 8
    machine.one([1], max_tokens=14)
    stats = machine.engine.stats
    # Prompt: 1 token. Rows of 4, 4, 4 and, with one token of room left, a plain row of 1.
    assert (stats.steps, stats.prompt_tokens, stats.output_tokens, stats.decode_rows) == (5, 1, 14, 4)
    assert (stats.drafted_tokens, stats.accepted_tokens) == (9, 9)
    assert stats.acceptance == {4: 3, 1: 1} and stats.mean_acceptance_length == pytest.approx(13 / 4)
    # h before each row: 0, 4, 8 (8 + 4 > 8: flush), 4
    rows = [(0, 4), (4, 4), (8, 4), (4, 1)]
    replay = machine.session.replay
    assert stats.flushes == machine.session.flushes == 1
    assert stats.state_bytes == LAYERS * sum(step_bytes(SHAPE, replay, h, n, 4).total for h, n in rows)
    assert stats.conventional_bytes == LAYERS * sum(
        conventional_step_bytes(SHAPE, StateFormat.FLOAT32, n, 4).total for _, n in rows
    )
    assert json.loads(json.dumps(stats.as_dict()))["acceptance"] == {"1": 1, "4": 3}


def test_replay_moves_fewer_bytes_than_the_conventional_kernel() -> None:
    machine = bench(window=16, draft_len=1)
    for i in range(4):
        machine.add([1 + i], max_tokens=40, end_id=-1)
    machine.run()
    stats = machine.engine.stats
    assert stats.flushes == machine.session.flushes == 4 * 2  # 39 rows each: h = 16 before rows 16 and 32
    pending = [*range(17), *range(1, 17), *range(1, 7)]
    expected = sum(step_bytes(SHAPE, machine.session.replay, h, 1, 4).total for h in pending)
    assert stats.state_bytes == 4 * LAYERS * expected < stats.conventional_bytes


def test_a_conventional_session_is_counted_as_one() -> None:
    stats = EngineStats()
    meter = TrafficMeter(geometry(), ReplayConfig(window=4), ActivationDtype.FLOAT32, stats, conventional=True)
    pending = 0
    for _ in range(10):
        pending = meter.decode_row(pending, 1, 1)
    assert pending == stats.flushes == 0
    assert stats.state_bytes == stats.conventional_bytes == 10 * LAYERS * 2 * 4 * SHAPE.state_elems


def test_an_engine_that_did_nothing_has_a_mean_of_zero() -> None:
    assert EngineStats().mean_acceptance_length == 0.0
