"""The MTP head after verify steps and forks: its cache is the one that a single prompt of the same tokens leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.paths import EXAMPLES
from tests.tolerance import REPLAY_LOGIT_NOISE
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

TOKENS = [268, 588, 917, 1287, 752, 2167, 396, 201, 1244, 5071, 330, 415, 1126, 286, 310, 5455, 467, 3369, 305, 3237]
PROMPT = 7


@pytest.fixture
def session() -> TorchSession:
    checkpoint = Checkpoint.open(EXAMPLES / "qwen3_5-tiny-nvfp4")
    replay = ReplayConfig(window=8, max_step_tokens=4)
    return TorchSession.from_checkpoint(checkpoint, replay, PoolConfig(slots=3, max_seq_len=64), debug=True)


def drafts(session: TorchSession, slot: int, next_tokens: list[int]) -> list[Logits]:
    """Logits of two drafts in a row; the second one also reads what the first one wrote."""
    first = session.mtp_begin([MtpRow(slot, next_tokens)])[0]
    return [first, session.mtp_next([11])[0]]


def one_shot(session: TorchSession, end: int) -> list[Logits]:
    slot = session.allocate(seed=1)
    session.prefill([PrefillChunk(slot, TOKENS[:end], True)])
    answer = drafts(session, slot, TOKENS[1 : end + 1])
    session.free(slot)
    return answer


@pytest.mark.parametrize("accepted", [[4, 4, 4], [1, 3, 2, 4, 1], [1, 1, 1, 1]], ids=str)
def test_drafts_after_verify_steps_equal_drafts_after_one_prompt(session: TorchSession, accepted: list[int]) -> None:
    slot = session.allocate(seed=1)
    session.prefill([PrefillChunk(slot, TOKENS[:PROMPT], True)])
    drafts(session, slot, TOKENS[1 : PROMPT + 1])
    position = PROMPT
    for count in accepted:
        wrong = [9] * (4 - count)  # rejected drafts
        session.decode([DecodeRow(slot, [*TOKENS[position : position + count], *wrong])])
        session.commit([count])
        answer = drafts(session, slot, TOKENS[position + 1 : position + count + 1])
        position += count
        for ours, expected in zip(answer, one_shot(session, position), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=REPLAY_LOGIT_NOISE)


def test_a_fork_drafts_as_its_source(session: TorchSession) -> None:
    slot = session.allocate(seed=1)
    session.prefill([PrefillChunk(slot, TOKENS[:PROMPT], True)])
    copy = session.fork(slot, seed=2)
    expected = drafts(session, slot, TOKENS[1 : PROMPT + 1])
    for ours, theirs in zip(drafts(session, copy, TOKENS[1 : PROMPT + 1]), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("told", [False, True], ids=["unseen", "told"])
def test_steps_that_are_not_the_sessions_own_leave_nothing_to_draft_from(session: TorchSession, told: bool) -> None:
    """As the steps of a device loop: what the head kept is of the prompt, and must not pass for the last token's."""
    slot = session.allocate(seed=1)
    session.prefill([PrefillChunk(slot, TOKENS[:PROMPT], True)])
    of_prompt = session.save(slot)
    step = session.static_step(batch=1, width=2)
    step.slot[0], step.num_tokens[0] = slot, 2
    step.ids[0] = torch.tensor(TOKENS[PROMPT : PROMPT + 2])
    step.forward()
    step.commit(torch.tensor([2]))
    if told:
        session.moved([slot])
        with pytest.raises(ContractError, match=f"next_tokens of slot {slot}: expected 0 tokens"):
            session.mtp_begin([MtpRow(slot, TOKENS[1 : PROMPT + 1])])
    of_step = session.save(slot)
    assert ("hidden" in of_prompt.arrays(), "hidden" in of_step.arrays()) == (True, False)
    copy = session.restore(of_step)
    with pytest.raises(ContractError, match=f"next_tokens of slot {copy}: expected 0 tokens"):
        session.mtp_begin([MtpRow(copy, TOKENS[PROMPT + 2 : PROMPT + 3])])
    session.decode([DecodeRow(copy, TOKENS[PROMPT + 2 : PROMPT + 3])])
    session.commit([1])
    assert "hidden" in session.save(copy).arrays()
    session.mtp_begin([MtpRow(copy, TOKENS[PROMPT + 3 : PROMPT + 4])])
