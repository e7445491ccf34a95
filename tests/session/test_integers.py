"""Token ids, slots and counts are whole numbers: a float is refused, not cut, and so is what no register can hold."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.paths import EXAMPLES
from tests.session.sessions import hashes, open_session, sequence, start
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

NAME = "qwen-moe"
BAD = [1.7, 2.0, np.float64(3.0), torch.tensor(1.5), "5", None, 2**70, -(2**70), 2**63]
CALLS: dict[str, Callable[[TorchSession, int, object], object]] = {
    "prefill": lambda s, n, bad: s.prefill([PrefillChunk(n, [5, bad], True)]),  # type: ignore[list-item]
    "decode": lambda s, n, bad: s.decode([DecodeRow(n, [5, bad])]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_token_that_is_no_id_is_refused(call: str, bad: object) -> None:
    session, ids = open_session(NAME), sequence(NAME)
    slot, _ = start(session, ids[:5])
    before = hashes(session)
    with pytest.raises(ContractError, match=f"{call}: tokens: expected"):
        CALLS[call](session, slot, bad)
    assert hashes(session) == before and session.cursors(slot).position == 5


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_count_that_is_no_integer_is_refused_and_the_step_can_still_be_committed(bad: object) -> None:
    session, ids = open_session(NAME), sequence(NAME)
    slot, _ = start(session, ids[:5])
    session.decode([DecodeRow(slot, ids[5:8])])
    before = hashes(session)
    with pytest.raises(ContractError, match="commit: accepted: expected"):
        session.commit([bad])  # type: ignore[list-item]
    assert hashes(session) == before
    session.commit([np.int64(2)])  # numpy's integers are integers
    assert session.cursors(slot).position == 7


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_drafting_takes_ids_only(bad: object) -> None:
    opened = Checkpoint.open(EXAMPLES / "qwen3_5-tiny-nvfp4")
    replay, pool = ReplayConfig(window=4, max_step_tokens=3), PoolConfig(slots=2, max_seq_len=32)
    session = TorchSession.from_checkpoint(opened, replay, pool, debug=True)
    slot, _ = start(session, [100, 200])
    with pytest.raises(ContractError, match="mtp_begin: tokens: expected"):
        session.mtp_begin([MtpRow(slot, [200, bad])])  # type: ignore[list-item]
    session.mtp_begin([MtpRow(slot, [200, 5])])
    with pytest.raises(ContractError, match="mtp_next: tokens: expected"):
        session.mtp_next([bad])  # type: ignore[list-item]
