"""Whole models through the public API: replay = conventional, speculative = plain, sampled speculation = sampled plain.

The bundled NVFP4 checkpoints, mixed batches of prompts of different lengths, pools poisoned and checked at every step.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.e2e.bundled import NEMOTRON, PROMPTS, QWEN, assert_same_greedy, drafter, run
from trtllm_replayssm import ReplayConfig, RequestOutput, SamplingParams
from trtllm_replayssm.dtypes import StateFormat

GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=2)
SAMPLED = [
    SamplingParams(max_tokens=24, temperature=t, top_p=0.95, seed=100 + i, ignore_eos=True, repetition_penalty=1.1)
    for i, t in enumerate((0.7, 1.0, 1.3, 0.9))
]
HALF = GREEDY.max_tokens * len(PROMPTS) // 2  # a comparison that stops earlier at near ties says too little
MODELS = pytest.mark.parametrize("model", [QWEN, NEMOTRON], ids=lambda path: path.name)


@cache
def plain(model: Path, state_cache: str = "replay") -> list[RequestOutput]:
    return run(model, GREEDY, state_cache=state_cache)[0]


@MODELS
@pytest.mark.parametrize("window", [1, 2, 3, 8, 16, 32])
def test_replay_equals_conventional_for_every_window(model: Path, window: int) -> None:
    replayed = run(model, GREEDY, replay_config=ReplayConfig(window=window))[0]
    assert assert_same_greedy(replayed, plain(model, "conventional")) > HALF


@pytest.mark.parametrize(
    ("step_tokens", "window"), [(t, window) for t in range(1, 9) for window in sorted({t, 8, 16})], ids=str
)
@pytest.mark.parametrize(("model", "kind"), [(QWEN, "mtp"), (QWEN, "ngram"), (NEMOTRON, "ngram")])
def test_speculative_greedy_equals_plain_greedy(model: Path, kind: str, step_tokens: int, window: int) -> None:
    outputs, stats = run(
        model, GREEDY, replay_config=ReplayConfig(window=window), speculative_config=drafter(kind, step_tokens - 1)
    )
    assert assert_same_greedy(outputs, plain(model)) > HALF
    if step_tokens > 1:
        assert stats["accepted_tokens"] > 0
        assert stats["accepted_tokens"] < stats["drafted_tokens"], "some drafts must have been rejected"


@pytest.mark.parametrize("step_tokens", [2, 4])
def test_conventional_speculation_with_snapshots_equals_plain(step_tokens: int) -> None:
    outputs, _ = run(QWEN, GREEDY, state_cache="conventional", speculative_config=drafter("mtp", step_tokens - 1))
    assert assert_same_greedy(outputs, plain(QWEN)) > HALF


@pytest.mark.parametrize(("model", "kind"), [(QWEN, "mtp"), (QWEN, "ngram"), (NEMOTRON, "ngram")])
def test_sampled_speculation_with_one_hot_drafts_equals_sampled_plain(model: Path, kind: str) -> None:
    plain_ids = [o.outputs[0].token_ids for o in run(model, SAMPLED)[0]]
    outputs, stats = run(model, SAMPLED, speculative_config=drafter(kind, 3))
    assert [o.outputs[0].token_ids for o in outputs] == plain_ids
    assert len({tuple(ids) for ids in plain_ids}) == len(PROMPTS)
    assert stats["drafted_tokens"] > 0


def _agreement(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


@MODELS
def test_two_precisions_are_reproducible_and_follow_the_float32_text(model: Path) -> None:
    """Stochastic rounding is keyed by the request: two runs are equal. NVFP4 reads are noisy: texts part, but late."""
    config = ReplayConfig(recurrence=StateFormat.FLOAT16, read=StateFormat.NVFP4)
    low, again = (run(model, GREEDY, replay_config=config)[0] for _ in range(2))
    ids = [output.outputs[0].token_ids for output in low]
    assert ids == [output.outputs[0].token_ids for output in again]
    agreed = [_agreement(ours, theirs.outputs[0].token_ids) for ours, theirs in zip(ids, plain(model), strict=True)]
    assert sum(agreed) / len(agreed) > 8, f"tokens in agreement with a float32 state: {agreed}"


@MODELS
def test_batch_composition_does_not_change_a_request(model: Path) -> None:
    alone = [run(model, GREEDY, prompts=[prompt])[0][0] for prompt in PROMPTS]
    assert assert_same_greedy(alone, plain(model)) > HALF


@MODELS
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_prompt_chunks_do_not_change_a_request(model: Path, chunk: int) -> None:
    chunked = run(model, GREEDY, prefill_chunk=chunk, max_num_tokens=24)[0]
    assert assert_same_greedy(chunked, plain(model)) > HALF
