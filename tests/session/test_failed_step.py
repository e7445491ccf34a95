"""A step that fails half-way leaves some layers ahead of others: its slots refuse everything but being freed."""

from __future__ import annotations

import pytest

from tests.paths import ROOT
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_graph import TorchGraph
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

PROMPT = [5, 9, 20, 3, 7]


@pytest.fixture(params=["nemotron-dense", "qwen-dense"])
def session(request: pytest.FixtureRequest) -> TorchSession:
    checkpoint = Checkpoint.open(ROOT / "tests" / "checkpoints" / request.param)
    return TorchSession.from_checkpoint(checkpoint, ReplayConfig(window=2), PoolConfig(slots=2, max_seq_len=32))


def fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pass runs out of memory after its last layer."""

    def lm_head(self: TorchGraph, x: object, weight: str) -> object:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(TorchGraph, "lm_head", lm_head)


def start(session: TorchSession) -> int:
    slot = session.allocate(seed=1)
    session.prefill([PrefillChunk(slot, PROMPT, True)])
    return slot


def decode(session: TorchSession, slot: int, token: int) -> list[float]:
    logits = session.decode([DecodeRow(slot, [token])])[0]
    session.commit([1])
    return [float(x) for x in logits[0]]


def test_a_failed_decode_cannot_be_repeated_silently(session: TorchSession, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, other = start(session), start(session)
    for token in (1, 2):
        decode(session, slot, token)
        decode(session, other, token)
    fail_once(monkeypatch)
    with pytest.raises(MemoryError):
        session.decode([DecodeRow(slot, [3])])
    for attempt in (
        lambda: session.decode([DecodeRow(slot, [3])]),
        lambda: session.prefill([PrefillChunk(slot, [3], True)]),
        lambda: session.save(slot),
        lambda: session.fork(slot, 2),
    ):
        with pytest.raises(ContractError, match="whose step failed"):
            attempt()
    expected = decode(session, other, 3)
    session.free(slot)
    again = start(session)
    assert again == slot, "the freed slot serves the next sequence"
    for token in (1, 2):
        decode(session, again, token)
    assert decode(session, again, 3) == expected


@pytest.mark.parametrize("last", [False, True])
def test_a_failed_prompt_chunk_cannot_be_repeated_silently(
    session: TorchSession, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    slot = session.allocate(seed=1)
    session.prefill([PrefillChunk(slot, PROMPT[:2], False)])
    fail_once(monkeypatch)
    with pytest.raises(MemoryError):
        session.prefill([PrefillChunk(slot, PROMPT[2:], last)])
    with pytest.raises(ContractError, match="whose step failed"):
        session.prefill([PrefillChunk(slot, PROMPT[2:], last)])
    session.free(slot)
    session.check_integrity()
