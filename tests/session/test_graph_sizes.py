"""Which batch sizes are recorded, where a step runs, and that padded steps are those of the rows alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.paths import EXAMPLES
from tests.session.sessions import FAMILIES, hashes, open_session, sequence, start
from tests.tolerance import LOGIT_NOISE, REPLAY_LOGIT_NOISE
from trtllm_replayssm.config import CudaGraphConfig, PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ConfigError, ContractError
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow
from trtllm_replayssm.runtime.session.decode_steps import DecodeSteps
from trtllm_replayssm.runtime.session.graph_sizes import RecordedSizes, batch_sizes, recorded_sizes
from trtllm_replayssm.runtime.session.logits_buffer import LogitsBuffer
from trtllm_replayssm.runtime.session.mtp_head import MtpHead
from trtllm_replayssm.runtime.session.slot_states import SlotStates
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint


def test_the_sizes_of_a_large_session_are_few() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(6) == (1, 2, 4, 6)
    assert batch_sizes(256) == (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
    assert batch_sizes(300)[-3:] == (192, 256, 300)


@given(largest=st.integers(1, 2000), data=st.data())
def test_every_step_has_a_size_that_wastes_less_than_half_and_at_most_63_rows_above_64(
    largest: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, largest))
    size = RecordedSizes(batch_sizes(largest)).place(rows)
    assert size is not None and rows <= size <= largest
    assert size < 2 * rows and (rows <= 64 or size < rows + 64)


def test_the_configuration_says_which_sizes_and_whether_to_pad() -> None:
    assert recorded_sizes(CudaGraphConfig(max_batch_size=5), 99).sizes == (1, 2, 4, 5)
    assert recorded_sizes(CudaGraphConfig(batch_sizes=(8, 2, 64)), 32).sizes == (2, 8, 32)
    exact = recorded_sizes(CudaGraphConfig(batch_sizes=(2, 8), enable_padding=False), 32)
    assert [exact.place(n) for n in (1, 2, 3, 8, 9)] == [None, 2, None, 8, None]
    padded = recorded_sizes(CudaGraphConfig(batch_sizes=(2, 8)), 32)
    assert [padded.place(n) for n in (1, 2, 3, 8, 9)] == [2, 2, 8, 8, None]
    assert RecordedSizes().place(1) is None
    with pytest.raises(ConfigError, match="batch_sizes"):
        CudaGraphConfig(batch_sizes=(0,))


def pad(session: TorchSession, *sizes: int) -> None:
    """Run a CPU session's steps and drafts as a GPU would, in rows of recorded sizes; nothing is recorded."""
    logits = LogitsBuffer(max(sizes) * session.replay.max_step_tokens, session.geometry.vocab, torch.device("cpu"))
    recorded = RecordedSizes(tuple(sizes))
    session._head = MtpHead(session._model, session.graphs, recorded, logits)
    session._slots = SlotStates(session.pools, session._positions, session._head)
    session._steps = DecodeSteps(session._model, session.graphs, recorded, logits, session._head.remember)


def open_bundled() -> TorchSession:
    """A model with a drafting head."""
    replay, pool = ReplayConfig(window=4, max_step_tokens=4), PoolConfig(slots=3, max_seq_len=64)
    return TorchSession.from_checkpoint(Checkpoint.open(EXAMPLES / "qwen3_5-tiny-nvfp4"), replay, pool, debug=True)


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("name", FAMILIES)
def test_padded_steps_are_those_of_their_rows(name: str, conventional: bool) -> None:
    """Rows of 0..4 tokens run in 2 or 3 rows of 1 or 4; products of more rows may differ in a last bit."""
    padded, plain = (open_session(name, conventional=conventional) for _ in range(2))
    pad(padded, 2, 3)
    ids, rng = sequence(name), np.random.default_rng(8)
    slots = [start(padded, ids[:n])[0] for n in (5, 9, 12, 20)]
    assert slots == [start(plain, ids[:n])[0] for n in (5, 9, 12, 20)]
    for index in range(8):
        rows = [DecodeRow(s, rng.integers(0, 60, int(rng.integers(0, 5))).tolist()) for s in slots][: 1 + index % 4]
        accepted = [int(rng.integers(0, 6)) for _ in rows]
        for got, want in zip(padded.decode(rows), plain.decode(rows), strict=True):
            assert got.shape == want.shape and np.abs(got - want).max(initial=0) <= LOGIT_NOISE
        padded.commit(accepted)
        plain.commit(accepted)
        assert [padded.cursors(s) for s in slots] == [plain.cursors(s) for s in slots]
    assert len(hashes(padded)) == 4
    padded.check_integrity()


def test_padded_drafts_are_those_of_their_rows() -> None:
    """From prompts, then from steps with 1..4 committed tokens; a slot that was freed or forked comes in between."""
    padded, plain = (open_bundled() for _ in range(2))
    pad(padded, 2, 4)
    rng = np.random.default_rng(9)
    prompts = [[100, 200, 300, 400, 500][:n] for n in (5, 2, 3)]
    slots = [start(padded, ids)[0] for ids in prompts]
    assert slots == [start(plain, ids)[0] for ids in prompts]
    pairs = [len(ids) for ids in prompts]
    for index in range(6):
        order = rng.permutation(3).tolist()
        follow = [MtpRow(slots[i], rng.integers(0, 900, pairs[i]).tolist()) for i in order]
        tokens = rng.integers(0, 900, (2, len(order))).tolist()
        # copies: on a CPU, what the session gives is the buffer that its next work overwrites
        drafts = [
            [np.array(s.mtp_begin(follow)), *(np.array(s.mtp_next(t)) for t in tokens)] for s in (padded, plain)
        ]
        difference = np.abs(np.array(drafts[0]) - np.array(drafts[1]))  # of two GDN replays
        assert np.median(difference) <= LOGIT_NOISE and difference.max() <= REPLAY_LOGIT_NOISE
        rows = [DecodeRow(s, rng.integers(0, 900, 4).tolist()) for s in slots]
        pairs = (1 + rng.permutation(4)[:3]).tolist()
        for session in (padded, plain):
            session.decode(rows)
            session.commit(pairs)
            if index == 3:
                session.free(slots[0])
                assert session.fork(slots[1], 5) == slots[0]
        if index == 3:
            pairs[0] = pairs[1]


def test_a_pass_that_fails_tears_its_slots_in_a_padded_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(FAMILIES[0])
    pad(session, 4)
    slot, _ = start(session, sequence(FAMILIES[0])[:9])
    monkeypatch.setattr(session._model.network, "forward", lambda ctx, ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.decode([DecodeRow(slot, [5])])
    monkeypatch.undo()
    with pytest.raises(ContractError, match="whose step failed"):
        session.decode([DecodeRow(slot, [5])])
