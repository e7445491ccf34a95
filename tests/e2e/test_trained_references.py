"""The trained checkpoints against references of another implementation (one-shot float32 forwards of the same weights).

NOISE is the largest difference between two correct float32 evaluations of these models that we state: ours differ from
the references by at most 2e-5, and the references' own cached and one-shot forwards by about as much. A greedy token
counts wherever the reference's top-2 margin exceeds it; the smallest margin in the files is 1.5e-3.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.e2e.greedy import GreedyRun, generate
from tests.paths import require_model
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

NOISE = 1e-4
MODELS = ["nemotron-tiny", "qwen3_5-tiny", "nemotron-moe-tiny", "qwen3_5-moe-tiny"]


@cache
def reference(name: str) -> dict[str, Any]:
    return json.loads((require_model(name) / "reference.json").read_text())


@cache
def checkpoint(name: str) -> Checkpoint:
    return Checkpoint.open(require_model(name))


def session(name: str, step_tokens: int = 1, state_cache: str = "replay") -> TorchSession:
    replay = ReplayConfig(window=16, max_step_tokens=step_tokens)
    return TorchSession.from_checkpoint(
        checkpoint(name), replay, PoolConfig(slots=1, max_seq_len=640), state_cache=state_cache
    )


def assert_greedy_matches(run: GreedyRun, prompt: dict[str, Any]) -> None:
    """Equal up to the first position where the reference itself was within the noise of another token."""
    for i, (ours, theirs) in enumerate(zip(run.ids, prompt["greedy64"], strict=True)):
        if prompt["greedy_margin_top1_top2"][i] <= NOISE:
            return
        assert ours == theirs, f"token {i}: {ours} instead of {theirs}, margin {prompt['greedy_margin_top1_top2'][i]}"


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_last_prompt_logits_and_64_greedy_tokens(name: str, index: int) -> None:
    prompt = reference(name)["prompts"][index]
    run = generate(session(name), prompt["input_ids"], 64)
    assert run.prompt_logits is not None
    order = np.argsort(-run.prompt_logits, kind="stable")[:20]
    assert order.tolist() == prompt["top20"]["ids"]
    np.testing.assert_allclose(run.prompt_logits[order], prompt["top20"]["logits"], rtol=0, atol=NOISE)
    assert_greedy_matches(run, prompt)


@pytest.mark.parametrize("name", ["nemotron-tiny", "qwen3_5-tiny"])
def test_conventional_state_cache_gives_the_same_tokens(name: str) -> None:
    prompt = reference(name)["prompts"][0]
    assert_greedy_matches(generate(session(name, state_cache="conventional"), prompt["input_ids"], 64), prompt)


@pytest.mark.parametrize("index", range(4))
def test_mtp_head_drafts_and_acceptance_lengths(index: int) -> None:
    prompt = reference("qwen3_5-tiny")["prompts"][index]
    expected = prompt["mtp"]
    run = generate(session("qwen3_5-tiny", step_tokens=4), prompt["input_ids"], 64, mtp_drafts=3)
    for ours, theirs in zip(run.first_drafts, expected["first_step_drafts"], strict=True):
        order = np.argsort(-ours, kind="stable")[:20]
        assert order.tolist() == theirs["top20"]["ids"]
        np.testing.assert_allclose(ours[order], theirs["top20"]["logits"], rtol=0, atol=NOISE)
    assert_greedy_matches(run, prompt)
    # the last step of either run is cut at 64 tokens
    compared = min(len(run.accepted) - 1, len(expected["accept_lengths_T4"]))
    assert compared >= len(expected["accept_lengths_T4"]) - 1
    assert run.accepted[:compared] == expected["accept_lengths_T4"][:compared]
