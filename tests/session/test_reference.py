"""The torch session against references made by another implementation (one-shot forwards, float32).

Every greedy id is compared: the smallest margin of these files is 0.016, above twice what a step loses except at the
few steps that `tolerance.CORRECTION_LOGIT_NOISE` describes, and there the margins are larger too. The numpy
interpreter, which rounds at the same points in float64, is compared far more closely (`test_specification.py`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.session.sessions import NAMES, force, open_session, reference, sequence, start, states
from tests.tolerance import CORRECTION_LOGIT_NOISE, CORRECTION_NOISE, LOGIT_NOISE
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.shapes import SsmKind


def assert_reference(session: TorchSession, name: str) -> None:
    """All three prompts in one batch: last logits, then 24 greedy tokens each."""
    prompts = reference(name)
    slots = [session.allocate(i) for i in range(3)]
    rows = session.prefill([PrefillChunk(s, p["input_ids"], True) for s, p in zip(slots, prompts, strict=True)])
    last = []
    for row, prompt in zip(rows, prompts, strict=True):
        assert row is not None
        got = row[prompt["top20"]["ids"]]
        assert np.abs(got - np.array(prompt["top20"]["logits"])).max() <= LOGIT_NOISE
        last.append(row)
    for step in range(24):
        tokens = [int(row.argmax()) for row in last]
        assert tokens == [prompt["greedy"][step] for prompt in prompts], step
        last = [logits[0] for logits in session.decode([DecodeRow(s, [t]) for s, t in zip(slots, tokens, strict=True)])]
        session.commit([1, 1, 1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [1, 8])
def test_replay_gives_the_reference_logits_and_greedy_ids(name: str, window: int) -> None:
    assert_reference(open_session(name, window=window, widest=1), name)


@pytest.mark.parametrize("name", NAMES)
def test_the_conventional_state_gives_the_reference_logits_and_greedy_ids(name: str) -> None:
    assert_reference(open_session(name, conventional=True), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [1, 2, 3, 8, 16, 32])
def test_replay_equals_conventional_in_logits_and_states(name: str, window: int) -> None:
    tokens = sequence(name)
    replayed, plain = open_session(name, window=window, widest=1), open_session(name, conventional=True)
    outputs, final = [], []
    for session in (replayed, plain):
        slot, first = start(session, tokens[:20])
        outputs.append(np.concatenate([first[None], force(session, slot, tokens[20:])]))
        final.append(states(session, slot))
    steps = np.abs(outputs[0] - outputs[1]).max(-1)
    gdn = replayed.geometry.ssm.kind is SsmKind.GDN
    typical, worst = CORRECTION_LOGIT_NOISE if gdn else (LOGIT_NOISE, LOGIT_NOISE)
    assert np.median(steps) <= typical and steps.max() <= worst
    for a, b in zip(*final, strict=True):
        limit = 10 * CORRECTION_NOISE if gdn else LOGIT_NOISE
        assert torch.isfinite(a).all() and float((a - b).abs().max()) <= limit * float(b.abs().max())
