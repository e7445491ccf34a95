"""The device loop on a GPU: the host path's tokens, nothing that waits, nothing recorded late, no growing memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.native import harness
from tests.native.test_session import weights
from tests.paths import EXAMPLES
from tests.runtime.torch_loops import Event, assert_same, bystander, make_engine, run, traffic
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.graph_sizes import CudaGraphConfig
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

MODEL = EXAMPLES / "qwen3_5-tiny-nvfp4"
KINDS = ("plain", "ngram", "mtp", "mtp-sampled")
ROWS = 8
# Every step of one batch size: the same matrix products, whoever launches them
GRAPHS = CudaGraphConfig(batch_sizes=(ROWS,))


def open_session(*, slots: int = ROWS + 1, conventional: bool = False) -> TorchSession:
    pool = PoolConfig(slots=slots, max_seq_len=512, activation=ActivationDtype.BFLOAT16)
    with Checkpoint.open(MODEL) as checkpoint:
        geometry = checkpoint.geometry
    replay = ReplayConfig(window=16, max_step_tokens=4)
    pools = StatePools.allocate(geometry, replay, pool, conventional=conventional, device=torch.device("cuda"))
    return TorchSession(weights(MODEL, "cuda", ActivationDtype.BFLOAT16), pools, cuda_graphs=GRAPHS)


def greedy_only(events: list[Event]) -> list[Event]:
    kept = {"max_tokens", "seed", "end_id", "stop_token_ids"}
    return [replace(e, settings={k: v for k, v in e.settings.items() if k in kept}) for e in events]


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
def test_plain_traffic_gets_the_tokens_of_the_host_s_path(conventional: bool) -> None:
    """64 requests, greedy and sampled, with cancellations and preemptions."""
    results = []
    for ahead in (False, True):
        session = open_session(conventional=conventional)
        slot, held = bystander(session)
        engine = make_engine(session, "plain", ahead=ahead)
        results.append(run(engine, traffic(64, 4000, seed=3, longest=40)))
        assert session.free_slots == session.pool.slots - 1 and engine.stats.preemptions > 0
        assert session.pools.slot_hash(slot) == held
    assert_same(results[1], results[0])


@pytest.mark.parametrize("kind", ["ngram", "mtp"])
def test_speculative_text_is_the_host_s_but_where_the_model_cannot_decide(kind: str) -> None:
    """The host runs narrower steps when nothing is drafted, so bfloat16 sums differ: ties may fall the other way."""
    events = greedy_only(traffic(24, 4000, seed=5, longest=60, disturb=False))
    want, got = (run(make_engine(open_session(), kind, ahead=ahead), events) for ahead in (False, True))
    adds = [e for e in events if e.what == "add"]
    undecided = 0
    for number, [(tokens, _)] in got.items():
        others = want[number][0][0]
        first = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
        if first is None:
            assert len(tokens) == len(others)
            continue
        undecided += 1
        narrow, wide = (forced(adds[number].prompt, others[: first + 1], width) for width in (1, 4))
        top = np.sort(narrow[first])[-2:]
        assert top[1] - top[0] <= 2 * np.abs(narrow - wide).max(), (number, first)
    assert undecided <= len(adds) // 4


def forced(prompt: tuple[int, ...], tokens: list[int], width: int) -> np.ndarray:
    """Logits [n, V] before each of `tokens`, fed `width` at a time."""
    session = open_session()
    slot, rows = session.allocate(seed=1), []
    logits = session.prefill([PrefillChunk(slot, list(prompt), True)])[0]
    assert logits is not None
    rows.append(logits)
    for at in range(0, len(tokens) - 1, width):
        part = tokens[at : min(at + width, len(tokens) - 1)]
        rows += list(session.decode([DecodeRow(slot, part)])[0])
        session.commit([len(part)])
    return np.array(rows)


def started(kind: str, settings: dict[str, Any]) -> Engine:
    """An engine whose eight requests decode on the device."""
    engine = make_engine(open_session(), kind, ahead=True)
    engine.warm_up()
    for i in range(ROWS):
        params = SamplingParams(max_tokens=400, seed=i, end_id=-1, **settings)
        engine.add_request([5 + i, 9, 5 + i, 9], params)
    for _ in range(4):
        engine.step()
    return engine


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_the_engine_waits_for_nothing_but_the_step_before(kind: str, settings: dict[str, Any]) -> None:
    """Torch refuses to wait while steps are launched and read; the trace has one graph and no copy that blocks each."""
    engine = started(kind, settings)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as trace:
            for _ in range(10):
                engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.name for event in trace.events()]
    assert names.count("cudaGraphLaunch") == 10
    waits = {n for n in names if "cudaStreamSynchronize" in n or "cudaDeviceSynchronize" in n}
    assert names.count("cudaStreamSynchronize") == 0 and names.count("cudaDeviceSynchronize") <= 2, waits
    assert not [n for n in names if n.startswith("cudaMemcpy") and "Async" not in n]


def test_a_launch_that_the_device_waited_for_is_counted() -> None:
    engine = started("plain", {})
    for _ in range(3):
        before = engine.stats.launches, engine.stats.late_launches
        torch.cuda.synchronize()  # nothing is left to do, and the engine has not read it
        engine.step()
        assert (engine.stats.launches, engine.stats.late_launches) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_recorded_after_warm_up_and_memory_stays(kind: str) -> None:
    session = open_session()
    engine = make_engine(session, kind, ahead=True)
    engine.warm_up()
    recorded, used = session.graphs.count, []
    for round_ in range(4):
        run(engine, traffic(24, 4000, seed=round_ % 2, longest=40))
        torch.cuda.synchronize()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert session.graphs.count == recorded > 0
    assert used[3] == used[1]
