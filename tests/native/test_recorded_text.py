"""Greedy text of recorded steps on CUDA is the CPU session's, plain and speculative, with both state caches.

Activations are bfloat16, whose matrix products differ between devices and with the number of rows: after the first
token that such a difference may decide, the texts may part.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.greedy import generate
from tests.native import harness
from tests.native.test_session import MODELS, PROMPT, forced, open_session
from tests.paths import EXAMPLES, require_model
from trtllm_replayssm.runtime.session.torch_session import TorchSession

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

NEW_TOKENS = 64
DRAFTS = 3
WITH_EXPERTS = ("nemotron-moe-tiny", "qwen3_5-moe-tiny")
CASES = [(model, False) for model in (*MODELS, *WITH_EXPERTS)] + [(MODELS[1], True)]


def opened(model: Path, device: str, *, conventional: bool) -> TorchSession:
    session = open_session(model, device, 1 + DRAFTS, conventional=conventional, debug=False)
    assert device == "cpu" or session.recorded.sizes, "steps are recorded"
    return session


@cache
def cpu_text(model: Path) -> list[int]:
    """64 tokens of plain greedy decoding of conventional states, the plainest there is."""
    return generate(opened(model, "cpu", conventional=True), PROMPT, NEW_TOKENS).ids


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize(("name", "speculative"), CASES)
def test_greedy_text_is_that_of_the_cpu_as_long_as_it_is_decided(
    name: str, speculative: bool, conventional: bool
) -> None:
    model = EXAMPLES / name if name in MODELS else require_model(name)
    cpu, session = cpu_text(model), opened(model, "cuda", conventional=conventional)
    run = generate(session, PROMPT, NEW_TOKENS, mtp_drafts=DRAFTS if speculative else 0)
    assert not speculative or max(run.accepted) > 1, "some drafts are right"
    assert session.graphs.count > 0
    same = next((i for i, (a, b) in enumerate(zip(cpu, run.ids, strict=True)) if a != b), NEW_TOKENS)
    if same == NEW_TOKENS:
        return
    assert same > 0, "the prompt's logits decide the first token"
    logits, cuda_logits = (
        forced(opened(model, device, conventional=conventional), cpu[:same], (1,)) for device in ("cpu", "cuda")
    )
    margin = float(logits[-1][cpu[same]] - logits[-1][run.ids[same]])
    assert margin <= 2.0 * np.abs(logits - cuda_logits).max(), (same, margin)
