"""Recorded steps of a session over engines, real CUDA graphs with the native kernels where there is a GPU.

Engines are torch functions (`hand_made`); on a CPU the graphs are watched calls (`recording`) and the operations the
reference's. Recorded and launched sessions must give the same bits: outputs, drafts, states, cursors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.builders.hand_made import SLOTS, TorchEngines, open_session
from tests.builders.recording import RecordingPool, on_the_device
from tests.native import harness
from trtllm_replayssm.config import EVERY_BATCH
from trtllm_replayssm.runtime.session import torch_session
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.capture import GraphPool, Recording
from trtllm_replayssm.runtime.session.tensorrt_ops import NativeStepOps
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.shapes import SsmKind

_MISSING = harness.unavailable()
_GPU = [pytest.mark.gpu, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]
DEVICES = ["cpu", pytest.param("cuda", marks=_GPU)]
KINDS = pytest.mark.parametrize("kind", SsmKind, ids=lambda kind: kind.value)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU sessions record as on a GPU whose kernels serve the pools."""
    if request.param == "cpu":

        def pool(
            device: torch.device, *, enabled: bool, recording: Recording, obstacle: Callable[[], str | None]
        ) -> RecordingPool | GraphPool:
            return RecordingPool([], recording, obstacle) if enabled else GraphPool(device, enabled=False)

        monkeypatch.setattr(torch_session, "GraphPool", pool)
        monkeypatch.setattr(torch_session, "waits_for_nothing", lambda pools, native: True)
        for owner, method in ((NativeStepOps, "run"), (StateOps, "commit")):
            monkeypatch.setattr(owner, method, on_the_device(getattr(owner, method)))
    return str(request.param)


def pair(kind: SsmKind, directory: Path, device: str) -> tuple[TensorRtSession, TensorRtSession]:
    """A session that records and one that launches, in the same state: every slot in use, prompts of several chunks."""
    both = tuple(open_session(kind, directory, device, graphs) for graphs in (EVERY_BATCH, None))
    both[0].warm_up()
    for session in both:
        for i in range(SLOTS):
            slot, prompt = session.allocate(i), [(7 * i + j) % 128 for j in range(9 + i)]
            session.prefill([PrefillChunk(slot, prompt[:5], False)])
            session.prefill([PrefillChunk(slot, prompt[5:], True)])
    return both


def enqueued(session: TensorRtSession) -> list[tuple[str, bool]]:
    assert isinstance(session._engines, TorchEngines)
    return session._engines.enqueued


@KINDS
def test_recorded_steps_and_drafts_have_the_bits_of_launched_ones(kind: SsmKind, tmp_path: Path, device: str) -> None:
    """Rows in any order, padding, rejections, flushes; all slots take part, so that both run products of one shape."""
    sessions, rng = pair(kind, tmp_path, device), np.random.default_rng(3)
    recorded = sessions[0].graphs.count
    assert recorded > 0 == sessions[1].graphs.count
    pairs = [9 - 5 + i for i in range(SLOTS)]
    for step in range(12):
        width = 1 if step % 3 == 2 else 4
        counts = [width, *(int(n) for n in rng.integers(1, width + 1, SLOTS - 1))]
        order = [int(slot) for slot in rng.permutation(SLOTS)]
        follow = [MtpRow(slot, rng.integers(0, 128, pairs[slot]).tolist()) for slot in order]
        tokens = rng.integers(0, 128, SLOTS).tolist()
        rows = [DecodeRow(slot, rng.integers(0, 128, n).tolist()) for slot, n in zip(order, counts, strict=True)]
        accepted = [int(rng.integers(1, n + 1)) for n in counts]
        results = []
        for session in sessions:
            drafts = [np.array(session.mtp_begin(follow)), np.array(session.mtp_next(tokens))]
            results.append([*drafts, *(np.array(logits) for logits in session.decode(rows))])
            session.commit(accepted)
        for got, want in zip(*results, strict=True):
            np.testing.assert_array_equal(got, want)
        pairs = [accepted[order.index(slot)] for slot in range(SLOTS)]
    for slot in range(SLOTS):
        assert sessions[0].cursors(slot) == sessions[1].cursors(slot)
        assert sessions[0].pools.slot_hash(slot) == sessions[1].pools.slot_hash(slot)
    assert sessions[0].graphs.count == recorded
    assert {own for _, own in enqueued(sessions[1])} == {False}


@KINDS
def test_a_replayed_step_waits_for_nothing(kind: SsmKind, tmp_path: Path, device: str) -> None:
    """Forward pass, choice, commit and a draft as one recorded piece of work, replayed without the host between."""
    session, _ = pair(kind, tmp_path, device)
    step = session.static_step(SLOTS, 4)
    accepted = torch.full((SLOTS,), 2, dtype=torch.int32, device=step.ids.device)

    def whole_step() -> None:
        start = step.position()
        output = step.forward()
        step.commit(accepted)
        step.ids.copy_(output.logits.argmax(-1))
        step.ids[:, 0].copy_(
            step.draft(accepted.clamp(max=step.num_tokens), start, step.ids, output.hidden).logits.argmax(-1)
        )

    replay = session.graphs.captured(whole_step)
    before = [session.cursors(slot).position for slot in range(SLOTS)]
    step.slot.copy_(torch.tensor([2, 0, 3, 1], dtype=torch.int32))
    step.num_tokens.fill_(4)
    calls = len(enqueued(session))
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            replay()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    session.moved(range(SLOTS))
    assert [session.cursors(slot).position - n for slot, n in enumerate(before)] == [16] * SLOTS
    if device == "cuda":
        assert len(enqueued(session)) == calls, "a replay calls no engine"
    else:
        assert enqueued(session)[calls:] == [("first", True), ("last", True), ("head", True)] * 8
