"""Verify steps with forced acceptance give the logits of plain decoding, and leave the state of the accepted tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.session.sessions import NAMES, assert_agree, force, open_session, sequence, start, states
from tests.tolerance import CORRECTION_NOISE, LOGIT_NOISE
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.spec.cursors import Cursors, commit

PROMPT = 20


def assert_states_agree(name: str, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    limit = CORRECTION_NOISE if name.startswith("qwen") else LOGIT_NOISE
    for a, b in zip(got, want, strict=True):
        assert float((a - b).abs().max()) <= limit * float(b.abs().max())


def verify(session: TorchSession, slot: int, ids: list[int], widest: int, seed: int) -> Logits:
    """Steps of 1..widest tokens, wrong from a random place on; logits [len(ids), V] of the accepted ones."""
    rng, rows, at = np.random.default_rng(seed), [], 0
    cursors = Cursors(position=session.cursors(slot).position)
    while at < len(ids):
        width = min(int(rng.integers(1, widest + 1)), len(ids) - at) if widest > 1 else 1
        accepted = int(rng.integers(1, width + 1))
        wrong = [(t + 91) % 250 + 3 for t in ids[at + accepted : at + width]]
        logits = session.decode([DecodeRow(slot, [*ids[at : at + accepted], *wrong])])[0]
        session.commit([accepted])
        commit(session.replay, cursors, width, accepted)
        rows.append(logits[:accepted])
        at += accepted
        now = session.cursors(slot)
        if not session.pools.conventional:
            assert (now.origin, now.h, now.position) == (cursors.origin, cursors.h, cursors.position)
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[Logits, list[torch.Tensor]]]:
    """Plain decoding of each model's longest sequence: logits after each token, and the final states."""
    found = {}
    for name in NAMES:
        session = open_session(name, widest=1)
        slot, _ = start(session, sequence(name)[:PROMPT])
        found[name] = force(session, slot, sequence(name)[PROMPT:]), states(session, slot)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("widest", range(1, 9))
def test_any_acceptance_of_any_step_size_equals_plain_decoding(
    name: str, widest: int, plain: dict[str, tuple[Logits, list[torch.Tensor]]]
) -> None:
    session = open_session(name, window=8, widest=widest)
    slot, _ = start(session, sequence(name)[:PROMPT])
    assert_agree(name, verify(session, slot, sequence(name)[PROMPT:], widest, seed=widest), plain[name][0])
    assert_states_agree(name, states(session, slot), plain[name][1])


@pytest.mark.parametrize("name", ["nemotron-moe", "qwen-dense"])
@pytest.mark.parametrize("window", [1, 2, 3, 16, 32])
def test_any_window_equals_plain_decoding(
    name: str, window: int, plain: dict[str, tuple[Logits, list[torch.Tensor]]]
) -> None:
    session = open_session(name, window=window, widest=min(window, 6))
    slot, _ = start(session, sequence(name)[:PROMPT])
    got = verify(session, slot, sequence(name)[PROMPT:], min(window, 6), seed=window)
    assert_agree(name, got, plain[name][0])
    assert_states_agree(name, states(session, slot), plain[name][1])


@pytest.mark.parametrize("name", ["nemotron-moe", "qwen-dense"])
def test_conventional_snapshots_equal_plain_conventional_decoding(name: str) -> None:
    ids, outputs, final = sequence(name), [], []
    for widest in (1, 4):
        session = open_session(name, widest=widest, conventional=True)
        slot, _ = start(session, ids[:PROMPT])
        outputs.append(verify(session, slot, ids[PROMPT:], widest, seed=3))
        final.append(states(session, slot))
    assert np.abs(outputs[0] - outputs[1]).max() <= LOGIT_NOISE
    for a, b in zip(*final, strict=True):
        assert float((a - b).abs().max()) <= LOGIT_NOISE * float(b.abs().max())
