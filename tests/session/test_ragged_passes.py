"""One long prompt among short ones is not computed for each of them: rows run in passes of like lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.paths import EXAMPLES
from tests.session.sessions import NAMES, open_session
from tests.tolerance import LOGIT_NOISE
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.session.base import Logits, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.network import TorchNetwork
from trtllm_replayssm.runtime.session.padded_rows import passes
from trtllm_replayssm.runtime.session.step_context import StepContext
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

LENGTHS = [2, 30, 1, 3, 16, 5]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80))
def test_no_pass_has_more_positions_than_there_are_tokens(counts: list[int]) -> None:
    found = passes(counts)
    assert sorted(row for rows in found for row in rows) == list(range(len(counts)))
    assert all(rows == sorted(rows) and len(rows) * max(counts[row] for row in rows) <= sum(counts) for rows in found)
    assert len(found) <= 4 + np.log2(max(counts))


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(-1, 1)), min_size=1, max_size=80))
def test_between_passes_there_are_no_more_states_than_before_or_behind_them(rows: list[tuple[int, int]]) -> None:
    counts, gains = [count for count, _ in rows], [gain for _, gain in rows]
    found = passes(counts, gains)
    assert sorted(found) == sorted(passes(counts))
    held = np.cumsum([sum(gains[row] for row in part) for part in found])
    assert held.max() <= max(0, held[-1])


def test_rows_of_one_length_are_one_pass() -> None:
    assert passes([7] * 5) == [[0, 1, 2, 3, 4]] and passes([]) == [] and passes([0, 0]) == [[0, 1]]


def prompts(session: TorchSession) -> list[PrefillChunk]:
    return [
        PrefillChunk(session.allocate(seed), [(seed + 3 * i) % 50 for i in range(length)], seed != 3)
        for seed, length in enumerate(LENGTHS, start=1)
    ]


def drafting_session(slots: int) -> TorchSession:
    pool = PoolConfig(slots=slots, max_seq_len=64)
    checkpoint = Checkpoint.open(EXAMPLES / "qwen3_5-tiny-nvfp4")
    return TorchSession.from_checkpoint(checkpoint, ReplayConfig(window=8, max_step_tokens=4), pool, debug=True)


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of each pass that the network runs."""
    found: list[int] = []
    forward = TorchNetwork.forward

    def counted(self: TorchNetwork, ctx: StepContext, ids: Tensor) -> object:
        found.append(ids.numel())
        return forward(self, ctx, ids)

    monkeypatch.setattr(TorchNetwork, "forward", counted)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_unlike_lengths_are_what_each_is_alone(name: str, positions: list[int]) -> None:
    together, alone = (open_session(name, slots=len(LENGTHS)) for _ in range(2))
    got = together.prefill(prompts(together))
    assert max(positions) <= sum(LENGTHS) and sum(positions) < len(LENGTHS) * max(LENGTHS)
    want: list[Logits | None] = [alone.prefill([chunk])[0] for chunk in prompts(alone)]
    for mine, other in zip(got, want, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or other is None or np.abs(mine - other).max() <= LOGIT_NOISE


def test_prompts_that_end_give_up_their_states_before_others_take_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one token that end four prompts beside rows of sixteen that begin four others."""
    session = open_session(NAMES[0], slots=8)
    old, new = ([session.allocate(seed) for seed in range(4)] for _ in range(2))
    session.prefill([PrefillChunk(slot, [1, 2, 3, 4], False) for slot in old])
    held: list[int] = []
    forward = TorchNetwork.forward

    def counted(self: TorchNetwork, ctx: StepContext, ids: Tensor) -> object:
        output = forward(self, ctx, ids)
        held.append(len(session.pools.carries))
        return output

    monkeypatch.setattr(TorchNetwork, "forward", counted)
    ends = [PrefillChunk(slot, [5], True) for slot in old]
    session.prefill([*ends, *(PrefillChunk(slot, [5] * 16, False) for slot in new)])
    assert len(held) > 1 and max(held) <= 4


def test_a_pass_that_fails_behind_others_leaves_no_row_of_the_call_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(NAMES[0], slots=len(LENGTHS) + 1)
    bystander = session.allocate(9)
    session.prefill([PrefillChunk(bystander, [1, 2, 3], True)])
    held, chunks, forward = session.pools.slot_hash(bystander), prompts(session), TorchNetwork.forward

    def fails_with_short_rows(self: TorchNetwork, ctx: StepContext, ids: Tensor) -> object:
        if ids.shape[1] < max(LENGTHS):
            raise MemoryError
        return forward(self, ctx, ids)

    monkeypatch.setattr(TorchNetwork, "forward", fails_with_short_rows)
    with pytest.raises(MemoryError):
        session.prefill(chunks)
    monkeypatch.undo()
    for chunk in chunks:
        with pytest.raises(ContractError, match="whose step failed"):
            session.prefill([PrefillChunk(chunk.slot, [1], True)])
        with pytest.raises(ContractError, match="whose step failed"):
            session.save(chunk.slot)
    assert session.pools.slot_hash(bystander) == held
    for chunk in chunks:
        session.free(chunk.slot)
    session.check_integrity()


def test_drafts_behind_prompts_of_unlike_lengths_are_what_each_is_alone() -> None:
    together, alone = drafting_session(len(LENGTHS)), drafting_session(len(LENGTHS))

    def rows(chunks: list[PrefillChunk]) -> list[MtpRow]:
        return [MtpRow(chunk.slot, [*chunk.tokens[1:], 7]) for chunk in chunks]

    chunks = prompts(together)
    together.prefill(chunks)
    got = together.mtp_begin(rows(chunks))
    following = together.mtp_next([int(logits.argmax()) for logits in got])
    for i, chunk in enumerate(prompts(alone)):
        alone.prefill([chunk])
        (want,) = alone.mtp_begin(rows([chunk]))
        (after,) = alone.mtp_next([int(got[i].argmax())])
        assert np.abs(got[i] - want).max() <= LOGIT_NOISE and np.abs(following[i] - after).max() <= LOGIT_NOISE


def test_a_slot_whose_step_failed_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = drafting_session(1)
    slot = session.allocate(1)
    session.prefill([PrefillChunk(slot, [5, 6, 7], False)])

    def fails(*_: object) -> object:
        raise MemoryError

    monkeypatch.setattr(TorchNetwork, "forward", fails)
    with pytest.raises(MemoryError):
        session.prefill([PrefillChunk(slot, [8], True)])
    monkeypatch.undo()
    with pytest.raises(ContractError, match="whose step failed"):
        session.mtp_begin([MtpRow(slot, [6, 7, 8])])
