"""Rows of different kinds in one step, in every order: each equals its solo run; what is not in the step keeps its
bytes (A20, C01, C02, D14).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from tests.session.sessions import assert_agree, force, hashes, open_session, sequence, start
from tests.tolerance import LOGIT_NOISE
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, PrefillChunk, SlotSnapshot
from trtllm_replayssm.runtime.session.torch_session import TorchSession

MODELS = ("nemotron-moe", "qwen-dense", "qwen-moe")
PROMPTS = {"verify": 11, "plain": 17, "idle": 5}


@cache
def situation(name: str) -> dict[str, SlotSnapshot]:
    """Three resident sequences at different h, one parked, and one with half a prompt."""
    session, ids = open_session(name, window=6, slots=6), sequence(name)
    slots = {"parked": start(session, ids[5:12], seed=9)[0]}
    for kind, length in PROMPTS.items():
        slots[kind] = start(session, ids[:length], seed=length)[0]
        force(session, slots[kind], ids[length : length + length % 6])
    slots["chunk"] = session.allocate(4)
    session.prefill([PrefillChunk(slots["chunk"], ids[:13], False)])
    return {kind: session.save(slot) for kind, slot in slots.items()}


def opened(name: str) -> tuple[TorchSession, dict[str, int]]:
    """A new session in that situation."""
    session = open_session(name, window=6, slots=6)
    return session, {kind: session.restore(snapshot) for kind, snapshot in situation(name).items()}


def row(kind: str, slots: dict[str, int], ids: list[int]) -> DecodeRow:
    if kind == "padded":
        return DecodeRow(-1, [3, 4])
    at = PROMPTS[kind] + PROMPTS[kind] % 6
    width = {"verify": 4, "plain": 1, "idle": 0}[kind]
    return DecodeRow(slots[kind], ids[at : at + width])


ACCEPTED = {"verify": 2, "plain": 1, "idle": 0, "padded": 7}


def step(session: TorchSession, slots: dict[str, int], ids: list[int], kinds: Sequence[str]) -> dict[str, Logits]:
    logits = session.decode([row(k, slots, ids) for k in kinds])
    session.commit([ACCEPTED[k] for k in kinds])
    return dict(zip(kinds, logits, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a20_d14_every_order_of_rows_equals_each_row_alone(name: str) -> None:
    """A20, D14: verify T = 4, plain T = 1, padding and an idle row of no tokens, first, in the middle and last; a
    prompt chunk of another slot before or after them.
    """
    ids, want, after = sequence(name), {}, {}
    for kind in ("verify", "plain"):
        alone, slots = opened(name)
        want[kind] = step(alone, slots, ids, [kind])[kind]
        at = alone.cursors(slots[kind]).position
        after[kind] = force(alone, slots[kind], ids[at : at + 2])
    alone, slots = opened(name)
    last = alone.prefill([PrefillChunk(slots["chunk"], ids[13:20], True)])[0]
    for i, kinds in enumerate(itertools.permutations(["verify", "plain", "padded", "idle"])):
        session, slots = opened(name)
        poison_dead_memory(session.pools)
        kept = {k: session.pools.slot_hash(slots[k]) for k in ("parked", "idle")}
        if i % 2:
            chunk = session.prefill([PrefillChunk(slots["chunk"], ids[13:20], True)])[0]
        got = step(session, slots, ids, kinds)
        if not i % 2:
            chunk = session.prefill([PrefillChunk(slots["chunk"], ids[13:20], True)])[0]
        assert got["padded"].shape[0] == 0 and got["idle"].shape[0] == 0
        assert chunk is not None and last is not None and np.abs(chunk - last).max() <= LOGIT_NOISE
        for kind in ("verify", "plain"):
            assert_agree(name, got[kind], want[kind])
            if i % 6 == 0:
                at = session.cursors(slots[kind]).position
                assert_agree(name, force(session, slots[kind], ids[at : at + 2]), after[kind])
        assert all(session.pools.slot_hash(slots[k]) == digest for k, digest in kept.items())


@pytest.mark.parametrize("name", MODELS)
def test_c01_c02_padding_touches_no_slot_and_slot_0_least_of_all(name: str) -> None:
    """C01, C02: three live rows padded to eight, slot 0 parked, every other slot hashed around 20 steps."""
    session, ids = open_session(name, window=6, slots=7), sequence(name)
    slots = [start(session, ids[: 4 + i], seed=i)[0] for i in range(5)]
    assert slots[0] == 0
    position = [4 + i for i in range(5)]
    for repeat in range(20):
        rows = [DecodeRow(slots[i], [ids[position[i]]]) for i in (1, 2, 3)]
        pads = [DecodeRow(-1, [9] * (repeat % 4 + 1)) for _ in range(5)]
        poison_dead_memory(session.pools)
        before = hashes(session)
        logits = session.decode([*pads[:2], *rows, *pads[2:]])
        session.commit([repeat % 5, 3, 1, 1, 1, 0, -1, 99])
        assert all(np.isfinite(x).all() for x in logits) and [len(x) for x in logits] == [0, 0, 1, 1, 1, 0, 0, 0]
        after = hashes(session)
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False, True, True, True]
        for i in (1, 2, 3):
            position[i] += 1


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_padding_rows_are_not_read(name: str) -> None:
    """A stale padded row may hold anything, ids beyond the vocabulary too."""
    session, ids = open_session(name), sequence(name)
    slot, _ = start(session, ids[:9])
    logits = session.decode([DecodeRow(-1, [10**9, -5]), DecodeRow(slot, [ids[9]]), DecodeRow(-1, [])])
    session.commit([2, 1, 0])
    other = open_session(name)
    same, _ = start(other, ids[:9])
    assert np.abs(logits[1] - force(other, same, [ids[9]])).max() <= LOGIT_NOISE
    assert session.decode([DecodeRow(-1, [4])])[0].shape == (0, session.geometry.vocab)
    session.commit([1])
    assert session.decode([]) == []
    session.commit([])
