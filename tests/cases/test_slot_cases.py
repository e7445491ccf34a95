"""Slots and snapshots on whole models: reuse, preemption, restore, short suffixes (A01, B01, B08, B12, B14, B16, B17).

No prefix cache is involved: where a report tells of a prefix hit, a snapshot is restored and its prompt continued.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.session.sessions import (
    FAMILIES,
    assert_agree,
    force,
    open_session,
    records,
    reference,
    sequence,
    start,
    states,
)
from tests.tolerance import LOGIT_NOISE
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession

POOLS: list[dict[str, Any]] = [{}, {"recurrence": StateFormat.FP8, "read": StateFormat.NVFP4}]
NAMES = ("nemotron-moe", "qwen-dense")


def same_bytes(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("pool", POOLS, ids=["float32", "two-precisions"])
def test_a01_b01_the_next_tenant_of_a_slot_sees_nothing_of_the_last(name: str, pool: dict[str, Any]) -> None:
    """A01, B01: A leaves at h, origin and position != 0, once with NaN states; B equals a fresh session bit for bit."""
    canary, other = reference(name)[2]["input_ids"], reference(name)[1]["input_ids"]
    fresh = open_session(name, window=5, **pool)
    slot, want = start(fresh, other, seed=3)
    outputs = [want, force(fresh, slot, other[:12])]
    for broken in (False, True):
        session = open_session(name, window=5, **pool)
        used, _ = start(session, canary, seed=2)
        force(session, used, canary[:7])
        assert session.cursors(used).h > 0 and session.cursors(used).origin > 0
        if broken:
            for tensor in (t for state in session.pools.ssm.values() for t in state.tensors()):
                tensor[used].view(torch.uint8).fill_(0x7F if tensor.dtype is torch.float8_e4m3fn else 0xFF)
        session.free(used)
        again, got = start(session, other, seed=3)
        assert again == used
        assert np.array_equal(got, outputs[0])
        assert np.array_equal(force(session, again, other[:12]), outputs[1])
        assert session.cursors(again) == fresh.cursors(slot)
        assert same_bytes(states(session, again), states(fresh, slot))
        assert same_bytes(records(session, again), records(fresh, slot))


def preempt(session: TorchSession, slot: int) -> int:
    """Save, leave, let two other sequences take slots, restore: the same slot is not free any more."""
    snapshot = session.save(slot)
    session.free(slot)
    start(session, [9, 8, 7], seed=50)
    moved = session.restore(snapshot)
    assert moved != slot and snapshot.position == session.cursors(moved).position
    return moved


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pool", POOLS, ids=["float32", "two-precisions"])
@pytest.mark.parametrize("pending", [0, 1, 4])
def test_b17_a_preempted_sequence_goes_on_bit_for_bit_in_another_slot(
    name: str, pool: dict[str, Any], pending: int
) -> None:
    """B17: preempted at h = 0, 1 and L - 1 (L = 5); verify steps follow; equal to the uninterrupted run, seed included.

    In the middle of a verify step saving is refused (`test_errors.py`); after its commit it is one of these.
    """
    ids = sequence(name)
    outputs, ends = [], []
    for interrupted in (False, True):
        session = open_session(name, window=5, widest=3, **pool)
        slot, _ = start(session, ids[:20], seed=31)
        force(session, slot, ids[20 : 25 + pending])
        if pending == 0:  # a step that flushes and rejects everything empties the window
            session.decode([DecodeRow(slot, [4, 5, 6])])
            session.commit([0])
        assert session.cursors(slot).h == (pending or 0)
        slot = preempt(session, slot) if interrupted else slot
        at = session.cursors(slot).position
        found = []
        for _ in range(6):
            found.append(session.decode([DecodeRow(slot, ids[at : at + 3])])[0])
            session.commit([2])
            at += 2
        outputs.append(np.concatenate(found))
        ends.append([*states(session, slot), *records(session, slot)])
    assert np.array_equal(outputs[0], outputs[1])
    assert same_bytes(ends[0], ends[1])


@pytest.mark.parametrize("name", NAMES)
def test_b17_a_prompt_interrupted_between_chunks_goes_on_in_another_slot(name: str) -> None:
    ids = sequence(name)
    session = open_session(name)
    slot = session.allocate(3)
    session.prefill([PrefillChunk(slot, ids[:11], False)])
    moved = preempt(session, slot)
    got = session.prefill([PrefillChunk(moved, ids[11:20], True)])[0]
    other, want = start(open_session(name), ids[:20])
    assert got is not None and np.abs(got - want).max() <= LOGIT_NOISE
    assert other == 0


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("suffix", [1, 2, 3, 15, 20])
def test_b08_b12_a_short_suffix_after_a_restore_starts_from_the_restored_state(name: str, suffix: int) -> None:
    """B08, B12: chunks of 1 and 2 tokens, shorter than K - 1 = 3, and longer ones; then decoding. The snapshot keeps
    its bytes, so it can be restored again with the same result.
    """
    ids = sequence(name)
    session = open_session(name)
    slot, _ = start(session, ids[:20], seed=4)
    snapshot = session.save(slot)
    kept = {key: value.clone() for key, value in snapshot.tensors.items()}  # type: ignore[attr-defined]
    source = session.pools.slot_hash(slot)
    plain = open_session(name)
    other, want = start(plain, ids[: 20 + suffix], seed=4)
    following = force(plain, other, ids[20 + suffix : 26 + suffix])
    for _ in range(2):
        own = session.restore(snapshot)
        got = session.prefill([PrefillChunk(own, ids[20 : 20 + suffix], True)])[0]
        assert got is not None
        assert_agree(name, got[None], want[None])
        assert_agree(name, force(session, own, ids[20 + suffix : 26 + suffix]), following)
        assert session.pools.slot_hash(own) != source
        session.free(own)
    for key, value in snapshot.tensors.items():  # type: ignore[attr-defined]
        assert torch.equal(value.view(torch.uint8), kept[key].view(torch.uint8))
    assert session.cursors(slot).position == 20


@pytest.mark.parametrize("name", FAMILIES)
def test_b14_keys_without_a_state_are_never_taken_for_a_prefix(name: str) -> None:
    """B14: the last tenant's KV stays in memory, its state is gone; one position counts for both, so the new prompt is
    computed from the start, and poison in the old KV does not show.
    """
    ids = sequence(name)
    session = open_session(name)
    slot, _ = start(session, ids[:30])
    session.free(slot)
    again = session.allocate(1)
    assert again == slot and session.cursors(again).position == 0
    got = session.prefill([PrefillChunk(again, ids[:30], True)])[0]
    _, want = start(open_session(name), ids[:30])
    assert got is not None and np.array_equal(got, want)


@pytest.mark.parametrize("name", FAMILIES)
def test_b16_a_snapshot_says_how_many_tokens_it_has_absorbed(name: str) -> None:
    """B16: two prompts share calls and end in the middle of chunks; a verify step commits part of its tokens."""
    ids = sequence(name)
    session = open_session(name)
    a, b = session.allocate(1), session.allocate(2)
    session.prefill([PrefillChunk(a, ids[:7], False), PrefillChunk(b, ids[:3], True)])
    assert [session.save(s).position for s in (a, b)] == [7, 3]
    session.decode([DecodeRow(b, ids[3:7]), DecodeRow(-1, [5])])
    session.commit([2, 4])
    session.prefill([PrefillChunk(a, ids[7:12], True)])
    snapshots = [session.save(s) for s in (a, b)]
    assert [s.position for s in snapshots] == [12, 5]
    for snapshot, slot, prompt in zip(snapshots, (a, b), (12, 3), strict=True):
        moved = session.restore(snapshot)
        position = snapshot.position
        got = force(session, moved, ids[position : position + 3])
        assert_agree(name, got, force(session, slot, ids[position : position + 3]))
        plain = open_session(name)
        other, _ = start(plain, ids[:prompt])
        force(plain, other, ids[prompt:position])
        assert_agree(name, got, force(plain, other, ids[position : position + 3]))
        session.free(moved)
