"""A refused call leaves every slot, every cursor and the step protocol as they were, and the session goes on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.paths import EXAMPLES
from tests.session.sessions import FAMILIES, checkpoint, force, hashes, open_session, sequence, start
from tests.tolerance import LOGIT_NOISE
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import CapacityError, ContractError, InvariantError, ReplaySSMError
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

Call = Callable[[TorchSession, int], object]

WRONG: dict[str, tuple[type[ReplaySSMError], str, Call]] = {
    "decode free slot": (InvariantError, "in use", lambda s, n: s.decode([DecodeRow(n, [5]), DecodeRow(2, [5])])),
    "decode unknown slot": (InvariantError, "in use", lambda s, n: s.decode([DecodeRow(n, [5]), DecodeRow(99, [5])])),
    "decode slot twice": (ContractError, "at most once", lambda s, n: s.decode([DecodeRow(n, [5]), DecodeRow(n, [6])])),
    "decode too wide": (ContractError, "T_max = 4", lambda s, n: s.decode([DecodeRow(1, [5] * 5)])),
    "decode too long": (ContractError, r"0\.\.3 \(max_seq_len 20\)", lambda s, n: s.decode([DecodeRow(n, [5] * 4)])),
    "decode large id": (ContractError, r"0\.\.255", lambda s, n: s.decode([DecodeRow(n, [5, 256])])),
    "decode negative id": (ContractError, r"0\.\.255", lambda s, n: s.decode([DecodeRow(n, [-1])])),
    "prefill free slot": (InvariantError, "in use", lambda s, n: s.prefill([PrefillChunk(2, [5], True)])),
    "prefill padding": (InvariantError, "in use", lambda s, n: s.prefill([PrefillChunk(-1, [5], True)])),
    "prefill nothing": (ContractError, r"1\.\.3", lambda s, n: s.prefill([PrefillChunk(n, [], True)])),
    "prefill too long": (ContractError, r"1\.\.3", lambda s, n: s.prefill([PrefillChunk(n, [5] * 4, True)])),
    "prefill large id": (ContractError, r"0\.\.255", lambda s, n: s.prefill([PrefillChunk(n, [256], True)])),
    "prefill slot twice": (
        ContractError, "at most once", lambda s, n: s.prefill([PrefillChunk(n, [5], True), PrefillChunk(n, [6], True)]),
    ),
    "commit without decode": (ContractError, "expected 0 counts", lambda s, n: s.commit([1])),
    "free a free slot": (InvariantError, "in use", lambda s, n: s.free(2)),
    "save a free slot": (InvariantError, "in use", lambda s, n: s.save(2)),
    "fork a free slot": (InvariantError, "in use", lambda s, n: s.fork(2, 1)),
    "bad seed": (ContractError, "seed", lambda s, n: s.allocate(-1)),
    "drafts without a head": (ContractError, "an MTP head", lambda s, n: s.mtp_begin([MtpRow(n, [5])])),
    "drafts without a beginning": (ContractError, "tokens", lambda s, n: s.mtp_next([5])),
}  # fmt: skip


@pytest.mark.parametrize("name", ["nemotron-dense", "qwen-moe"])
@pytest.mark.parametrize("case", WRONG)
def test_a_refused_call_changes_nothing(name: str, case: str) -> None:
    session, ids = open_session(name, max_seq_len=20, slots=3), sequence(name)
    slot, _ = start(session, ids[:15])
    force(session, slot, ids[15:17])
    start(session, ids[:4], seed=2)
    poison_dead_memory(session.pools)
    before, free = hashes(session), session.free_slots
    kind, message, call = WRONG[case]
    with pytest.raises(kind, match=message):
        call(session, slot)
    assert hashes(session) == before and session.free_slots == free
    session.check_integrity()
    other = open_session(name, max_seq_len=20)
    same, _ = start(other, ids[:15])
    want = force(other, same, ids[15:20])[2:]
    assert np.abs(force(session, slot, ids[17:20]) - want).max() <= LOGIT_NOISE  # up to the very last position


PENDING: dict[str, Call] = {
    "decode": lambda s, n: s.decode([DecodeRow(n, [5])]),
    "prefill": lambda s, n: s.prefill([PrefillChunk(n, [5], True)]),
    "free": lambda s, n: s.free(n),
    "save": lambda s, n: s.save(n),
    "fork": lambda s, n: s.fork(n, 3),
    "commit of another count": lambda s, n: s.commit([1, 1]),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("case", PENDING)
def test_b17_between_a_step_and_its_commit_nothing_else_may_touch_its_rows(name: str, case: str) -> None:
    """B17: records that a step has folded still count until its commit; a snapshot would count them twice."""
    session, ids = open_session(name, window=4, widest=3), sequence(name)
    slot, _ = start(session, ids[:9])
    force(session, slot, ids[9:12])
    session.decode([DecodeRow(slot, ids[12:15])])  # h = 3 of L = 4: flushes
    before, free = hashes(session), session.free_slots
    with pytest.raises(ContractError, match="commit" if case != "commit of another count" else "1 counts"):
        PENDING[case](session, slot)
    assert hashes(session) == before and session.free_slots == free
    session.commit([2])
    cursors = session.cursors(slot)
    assert (cursors.origin, cursors.h, cursors.position) == (3, 2, 14)
    other = open_session(name, window=4, widest=3)
    same, _ = start(other, ids[:9])
    want = force(other, same, ids[9:20])[5:]
    got = force(session, slot, ids[14:20])
    assert np.median(np.abs(got - want).max(-1)) <= LOGIT_NOISE


@pytest.mark.parametrize("name", FAMILIES)
def test_slots_outside_a_pending_step_can_come_and_go(name: str) -> None:
    session, ids = open_session(name), sequence(name)
    slot, _ = start(session, ids[:9])
    parked, _ = start(session, ids[:5])
    session.decode([DecodeRow(slot, ids[9:11]), DecodeRow(-1, [3])])
    snapshot = session.save(parked)
    session.free(parked)
    assert session.restore(snapshot) == parked
    session.free(session.fork(parked, 3))
    session.free(session.allocate(7))
    session.commit([2, 0])
    assert session.cursors(slot).position == 11
    session.check_integrity()


def test_a_full_session_refuses_and_stays_whole() -> None:
    session = open_session("qwen-moe", slots=2)
    ids = sequence("qwen-moe")
    slot, _ = start(session, ids[:9])
    session.allocate(3)
    snapshot, before = session.save(slot), hashes(session)
    calls: list[Callable[[], int]] = [
        lambda: session.allocate(1), lambda: session.fork(slot, 1), lambda: session.restore(snapshot),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CapacityError, match="all 2 in use"):
            call()
    assert hashes(session) == before and session.free_slots == 0


def test_drafting_calls_out_of_turn_are_refused() -> None:
    """On a bundled checkpoint with an MTP head: a wrong count, a free slot, a pending step, a freed slot."""
    opened = Checkpoint.open(EXAMPLES / "qwen3_5-tiny-nvfp4")
    replay, pool = ReplayConfig(window=4, max_step_tokens=3), PoolConfig(slots=2, max_seq_len=32)
    session = TorchSession.from_checkpoint(opened, replay, pool, debug=True)
    slot, _ = start(session, [100, 200, 300])
    spare, _ = start(session, [7, 8])
    session.free(spare)
    for rows in ([MtpRow(slot, [5])], [MtpRow(spare, [5, 6])], [MtpRow(slot, [200, 300, 5]), MtpRow(slot, [5])]):
        with pytest.raises(ContractError):
            session.mtp_begin(rows)
    first = session.mtp_begin([MtpRow(slot, [200, 300, 5])])[0]
    with pytest.raises(ContractError, match="one per drafting row"):
        session.mtp_next([1, 2])
    session.decode([DecodeRow(slot, [5, 6])])
    late: list[Callable[[], object]] = [
        lambda: session.mtp_begin([MtpRow(slot, [200, 300, 5])]), lambda: session.mtp_next([6]),
    ]  # fmt: skip
    for call in late:
        with pytest.raises(ContractError, match="commit"):
            call()
    session.commit([0])
    assert np.isfinite(first).all() and first.shape == (session.geometry.vocab,)
    session.free(slot)
    with pytest.raises(ContractError, match="one per drafting row"):
        session.mtp_next([6])


def test_an_unknown_state_cache_is_refused() -> None:
    session = open_session("qwen-moe")
    with pytest.raises(ContractError, match="replay or conventional"):
        TorchSession.from_checkpoint(checkpoint("qwen-moe"), session.replay, session.pool, state_cache="both")
