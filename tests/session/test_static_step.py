"""A step of fixed shape gives the logits, states and cursors of the session's own steps, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.session.sessions import FAMILIES, hashes, open_session, sequence, start
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.session.base import DecodeRow
from trtllm_replayssm.runtime.session.static_step import StaticStep

WIDTH = 3


def fill(step: StaticStep, rows: list[tuple[int, list[int]]]) -> None:
    """Write a step's rows; the tokens that do not exist keep id 0."""
    step.clear()
    step.ids.zero_()
    for i, (slot, tokens) in enumerate(rows):
        step.slot[i], step.num_tokens[i] = slot, len(tokens)
        step.ids[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_mixed_rows_are_those_of_the_session(name: str, conventional: bool) -> None:
    """Padding, rows without tokens and short rows in each step; every third token is rejected; flushes happen."""
    session, judge = (open_session(name, conventional=conventional) for _ in range(2))
    step = session.static_step(batch=5, width=WIDTH)
    ids, rng = sequence(name), np.random.default_rng(5)
    slots = [start(session, ids[:n])[0] for n in (9, 17, 30)]
    assert slots == [start(judge, ids[:n])[0] for n in (9, 17, 30)]
    for _ in range(12):
        lengths = rng.permutation([0, 1, WIDTH])
        rows = [(slot, rng.integers(0, 60, n).tolist()) for slot, n in zip(slots, lengths, strict=True)]
        rows.insert(1, (-1, []))
        accepted = [int(rng.integers(0, len(tokens) + 1)) for _, tokens in rows]
        fill(step, rows)
        logits = step.forward().logits
        step.commit(torch.tensor([*accepted, 0]))
        want = judge.decode([DecodeRow(slot, tokens) for slot, tokens in rows])
        judge.commit(accepted)
        for row, expected in enumerate(want):
            np.testing.assert_array_equal(logits[row, : len(expected)].numpy(), expected)
        for each in (session, judge):
            poison_dead_memory(each.pools)  # what means nothing may differ
        assert hashes(session) == hashes(judge)
        assert [session.cursors(s) for s in slots] == [judge.cursors(s) for s in slots]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_are_all_padding_change_nothing(name: str) -> None:
    session = open_session(name)
    start(session, sequence(name)[:20])
    step, before = session.static_step(batch=3, width=2), hashes(session)
    session.graphs.captured(step.forward)()
    step.commit(torch.full((3,), 2))
    assert hashes(session) == before


def test_the_session_checks_room_by_where_static_steps_have_moved_its_slots() -> None:
    """Its host copies of positions follow its own steps, and `moved` makes it look again."""
    session = open_session(FAMILIES[0], max_seq_len=20)
    slot, _ = start(session, sequence(FAMILIES[0])[:10])
    step = session.static_step(batch=1, width=4)
    for _ in range(2):
        fill(step, [(slot, [5, 6, 7, 8])])
        step.forward()
        step.commit(torch.tensor([4]))
    session.moved([slot])
    with pytest.raises(ContractError, match=rf"tokens of slot {slot}: expected 0..2"):
        session.decode([DecodeRow(slot, [5, 6, 7])])
    session.decode([DecodeRow(slot, [5, 6])])
    session.commit([1])
    with pytest.raises(ContractError, match=rf"tokens of slot {slot}: expected 0..1"):
        session.decode([DecodeRow(slot, [5, 6])])


def test_a_step_wider_than_the_pool_is_refused() -> None:
    with pytest.raises(ContractError, match="at most T_max = 4, got 5"):
        open_session(FAMILIES[0]).static_step(batch=1, width=5)
