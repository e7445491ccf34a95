"""Recorded steps of a torch session: the bits of steps launched one by one, no waiting, no growth, none recorded late.

The sessions of a test differ in `cuda_graphs` only, and their batches are of recorded sizes, so that both run the same
matrix products.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.native import harness
from tests.native.test_session import weights
from tests.paths import EXAMPLES
from trtllm_replayssm.config import EVERY_BATCH, PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

MODEL = EXAMPLES / "qwen3_5-tiny-nvfp4"
WIDEST = 4
PROMPT = [1, 45, 812, 77, 3071, 404, 29, 1500, 6, 911, 230, 58]
CACHES = pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])


def open_session(*, recorded: bool, conventional: bool = False, slots: int = 4, window: int = 16) -> TorchSession:
    pool = PoolConfig(slots=slots, max_seq_len=2048, activation=ActivationDtype.BFLOAT16)
    replay = ReplayConfig(window=window, max_step_tokens=WIDEST)
    with Checkpoint.open(MODEL) as checkpoint:
        geometry = checkpoint.geometry
    pools = StatePools.allocate(geometry, replay, pool, conventional=conventional, device=torch.device("cuda"))
    for cache in (t for kv in pools.kv.values() for t in kv.tensors()):
        cache.zero_()  # the drafting head's are part of a slot's hash whether or not anything drafts
    graphs = EVERY_BATCH if recorded else None
    session = TorchSession(weights(MODEL, "cuda", ActivationDtype.BFLOAT16), pools, cuda_graphs=graphs)
    assert session._state_ops.native is not None
    return session


def prompts(session: TorchSession, count: int) -> list[int]:
    slots = [session.allocate(seed=i) for i in range(count)]
    session.prefill([PrefillChunk(slot, PROMPT[i:], True) for i, slot in enumerate(slots)])
    return slots


@CACHES
@pytest.mark.parametrize("width", [1, WIDEST])
def test_recorded_steps_have_the_bits_of_launched_ones(width: int, conventional: bool) -> None:
    """24 steps of mixed rows with padding and rejections: logits, cursors and everything a slot remembers."""
    recorded, launched = (open_session(recorded=r, conventional=conventional) for r in (True, False))
    slots, rng = prompts(recorded, 3), np.random.default_rng(3)
    assert slots == prompts(launched, 3)
    for _ in range(24):
        counts = [width, *rng.integers(0, width + 1, 2)]
        rows = [DecodeRow(s, rng.integers(0, 4000, n).tolist()) for s, n in zip(slots, counts, strict=True)]
        rows.insert(int(rng.integers(0, 4)), DecodeRow(-1, []))
        accepted = [int(rng.integers(0, len(row.tokens) + 1)) for row in rows]
        got, want = recorded.decode(rows), launched.decode(rows)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
        for session in (recorded, launched):
            session.commit(accepted)
            poison_dead_memory(session.pools)  # what means nothing may differ
        assert [recorded.cursors(s) for s in slots] == [launched.cursors(s) for s in slots]
    assert [recorded.pools.slot_hash(s) for s in range(4)] == [launched.pools.slot_hash(s) for s in range(4)]
    assert recorded.graphs.count > 0 == launched.graphs.count


def test_recorded_drafting_has_the_bits_of_launched_drafting() -> None:
    """From a prompt's hidden states, then from those of steps with 1..T committed tokens."""
    recorded, launched = (open_session(recorded=r) for r in (True, False))
    slots, rng = prompts(recorded, 4), np.random.default_rng(4)
    assert slots == prompts(launched, 4)
    pairs = [len(PROMPT) - i for i in range(4)]
    for _ in range(6):
        follow = [MtpRow(s, rng.integers(0, 4000, n).tolist()) for s, n in zip(slots, pairs, strict=True)]
        tokens = rng.integers(0, 4000, (2, 4)).tolist()
        drafts = []
        for session in (recorded, launched):
            drafts.append([session.mtp_begin(follow), *(session.mtp_next(each) for each in tokens)])
        np.testing.assert_array_equal(np.array(drafts[0]), np.array(drafts[1]))
        rows = [DecodeRow(s, rng.integers(0, 4000, WIDEST).tolist()) for s in slots]
        pairs = (1 + rng.permutation(WIDEST)).tolist()
        for session in (recorded, launched):
            session.decode(rows)
            session.commit(pairs)


@CACHES
def test_a_replayed_step_and_its_commit_wait_for_nothing(conventional: bool) -> None:
    """Torch refuses to wait while they are enqueued, and the trace of 8 steps shows one synchronisation, the last."""
    session = open_session(recorded=True, conventional=conventional)
    slots = prompts(session, 4)
    step = session.static_step(4, WIDEST)
    accepted = torch.full((4,), 2, dtype=torch.int32, device="cuda")

    def whole_step() -> None:
        step.ids.copy_(step.forward().logits.argmax(-1))
        step.commit(accepted)

    replay = session.graphs.captured(whole_step)
    step.slot.copy_(torch.tensor(slots, dtype=torch.int32))
    step.num_tokens.fill_(WIDEST)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as trace:
            for _ in range(8):
                replay()
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.name for event in trace.events()]
    waits = [n for n in names if "Synchronize" in n or ("cudaMemcpy" in n and "Async" not in n)]
    assert names.count("cudaGraphLaunch") == 8 and len(waits) <= 2, waits
    session.moved(slots)
    assert [session.cursors(s).position for s in slots] == [len(PROMPT) - i + 16 for i in range(4)]


@CACHES
def test_nothing_is_recorded_after_warm_up_and_memory_stays(conventional: bool) -> None:
    """1,000 steps of every number of rows and tokens; the device's memory is the same before and after."""
    session = open_session(recorded=True, conventional=conventional, slots=6)
    session.warm_up()
    slots, rng = prompts(session, 6), np.random.default_rng(6)
    recorded, used = session.graphs.count, []
    for index in range(1000):
        rows = [DecodeRow(s, rng.integers(0, 4000, int(rng.integers(1, WIDEST + 1))).tolist()) for s in slots]
        rows = rows[: 1 + index % 6]
        session.decode(rows)
        session.commit([1] * len(rows))
        if index in (20, 999):
            torch.cuda.synchronize()
            used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert session.graphs.count == recorded
    assert used[0] == used[1]
