"""A replica whose model two processes share writes what one process writes; its slots move like any others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.paths import ROOT
from tests.session.sessions import reference
from tests.tolerance import REPLAY_LOGIT_NOISE
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.errors import ConfigError, InvariantError
from trtllm_replayssm.runtime.checkpoint_session import checkpoint_session
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk, Session
from trtllm_replayssm.runtime.session.shared_session import SharedSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(240)
NAMES = ("nemotron-moe", "qwen-moe")
REPLAY = ReplayConfig(window=8, max_step_tokens=4, recurrence=StateFormat.FP8, read=StateFormat.NVFP4)
POOL = PoolConfig(slots=3, max_seq_len=96, activation=ActivationDtype.FLOAT32)


def directory(name: str) -> Path:
    return ROOT / "tests" / "checkpoints" / name


def opened(name: str, ranks: int, replay: ReplayConfig = REPLAY) -> Session:
    return checkpoint_session(
        Checkpoint.open(directory(name)), replay, POOL, state_cache="replay", device="cpu", cuda_graphs=None,
        debug=True, ranks=ranks,
    )  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def sessions(request: pytest.FixtureRequest) -> Iterator[tuple[str, Session, Session]]:
    """The model's name, a session of two ranks, and one of one."""
    shared = opened(request.param, 2)
    assert isinstance(shared, SharedSession)
    yield request.param, shared, opened(request.param, 1)
    shared.close()


def assert_near(shared: object, alone: object) -> None:
    for ours, theirs in zip(shared, alone, strict=True):  # type: ignore[call-overload]
        np.testing.assert_allclose(ours, theirs, atol=REPLAY_LOGIT_NOISE, rtol=0)


def test_two_ranks_compute_what_one_does_through_flushes_and_rollbacks(sessions: tuple[str, Session, Session]) -> None:
    name, shared, alone = sessions
    entry = reference(name)[1]
    prompt, text = entry["input_ids"], entry["greedy"]
    slots = [s.allocate(5) for s in (shared, alone)]
    assert slots[0] == slots[1]
    slot = slots[0]
    for chunk in (PrefillChunk(slot, prompt[:7], False), PrefillChunk(slot, prompt[7:], True)):
        ours, theirs = shared.prefill([chunk])[0], alone.prefill([chunk])[0]
        assert (ours is None) == (theirs is None)
    assert_near([ours], [theirs])
    done = 0
    for accepted in (1, 4, 2, 3, 0, 4, 1, 2, 3):  # windows of 8 fill and flush; the FP8 checkpoint draws random numbers
        row = DecodeRow(slot, text[done : done + 4])
        assert_near(shared.decode([row]), alone.decode([row]))
        for session in (shared, alone):
            session.commit([accepted])
        done += accepted
        assert shared.cursors(slot) == alone.cursors(slot)
    if shared.geometry.mtp_pattern:
        row_of = MtpRow(slot, text[done - 3 + 1 : done + 1])
        assert_near(shared.mtp_begin([row_of]), alone.mtp_begin([row_of]))
        assert_near(shared.mtp_next([text[0]]), alone.mtp_next([text[0]]))
    for session in (shared, alone):
        session.check_integrity()
        session.free(slot)


def test_a_slot_is_saved_and_restored_with_every_rank_s_part(sessions: tuple[str, Session, Session]) -> None:
    name, shared, _ = sessions
    entry = reference(name)[0]
    slot = shared.allocate(9)
    shared.prefill([PrefillChunk(slot, entry["input_ids"], True)])
    shared.decode([DecodeRow(slot, entry["greedy"][:3])])
    shared.commit([3])
    snapshot = shared.save(slot)
    arrays = snapshot.arrays()
    assert {key.partition("/")[0] for key in arrays} == {"0", "1"}
    again = shared.load_snapshot(snapshot.position, arrays, prompt_done=True)
    copies = [shared.restore(snapshot), shared.fork(slot, 9)]
    expected = shared.decode([DecodeRow(slot, entry["greedy"][3:5])])
    shared.commit([2])
    for copy in copies:
        np.testing.assert_array_equal(shared.decode([DecodeRow(copy, entry["greedy"][3:5])])[0], expected[0])
        shared.commit([2])
        shared.free(copy)
    shared.free(slot)
    restored = shared.restore(again)
    np.testing.assert_array_equal(shared.decode([DecodeRow(restored, entry["greedy"][3:5])])[0], expected[0])
    shared.commit([0])
    shared.free(restored)
    assert shared.free_slots == POOL.slots


def test_an_error_of_all_ranks_is_one_error_and_the_session_goes_on(sessions: tuple[str, Session, Session]) -> None:
    name, shared, _ = sessions
    with pytest.raises(InvariantError, match="slot"):
        shared.decode([DecodeRow(2, [1])])
    slot = shared.allocate(1)
    assert shared.prefill([PrefillChunk(slot, reference(name)[0]["input_ids"], True)])[0] is not None
    shared.free(slot)


def test_a_second_replica_over_ranks_in_a_process_is_refused(sessions: tuple[str, Session, Session]) -> None:
    with pytest.raises(ConfigError, match="a second one"):
        opened(sessions[0], 2)
