"""Prefix caching through the public API, over the bundled checkpoints and with both kinds of state cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.bundled import NEMOTRON, PROMPTS, QWEN, assert_same_greedy, drafter
from trtllm_replayssm import LLM, KvCacheConfig, RequestOutput, SamplingParams
from trtllm_replayssm.errors import ConfigError, RequestError

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2)
REUSE = KvCacheConfig(enable_block_reuse=True, tokens_per_block=16, host_cache_size=50 << 20)
LONG = [f"{' '.join(PROMPTS)} {tail}" for tail in ("and then", "or not", "because", "when")]


def answers(llm: LLM) -> list[RequestOutput]:
    return [llm.generate(prompt, GREEDY, use_tqdm=False) for prompt in LONG]  # type: ignore[misc]


@pytest.mark.parametrize(("model", "kind"), [(QWEN, "mtp"), (QWEN, "ngram"), (NEMOTRON, "ngram")])
@pytest.mark.parametrize("state_cache", ["replay", "conventional"])
def test_prompts_that_begin_alike_give_the_same_text_with_and_without_reuse(
    model: Path, kind: str, state_cache: str
) -> None:
    options = {"max_seq_len": 192, "debug": True, "state_cache": state_cache}
    with LLM(model, **options) as llm:  # type: ignore[arg-type]
        plain = answers(llm)
        assert llm.stats()["prefix_lookups"] == 0
    with LLM(model, kv_cache_config=REUSE, speculative_config=drafter(kind, 3), **options) as llm:  # type: ignore[arg-type]
        reused, stats = answers(llm), llm.stats()
    assert assert_same_greedy(reused, plain) > 40
    cached = [output.cached_tokens for output in reused]
    assert cached[0] == 0 and min(cached[1:]) >= 16
    assert stats["prefix_hits"] == 3 and stats["prefix_hit_tokens"] == sum(cached)
    assert 0 < int(stats["prefix_bytes"]) <= 50 << 20  # type: ignore[call-overload]


def test_a_budget_below_one_snapshot_is_refused_at_start_with_the_bytes_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"host_cache_size: expected at least \d+ bytes .*, got 1000"):
        LLM(QWEN, kv_cache_config=KvCacheConfig(enable_block_reuse=True, host_cache_size=1000))


def test_a_priority_comes_in_through_generate_async_and_is_checked() -> None:
    with LLM(NEMOTRON, max_seq_len=192, max_batch_size=1) as llm:
        low = llm.generate_async([5, 6], SamplingParams(max_tokens=60, ignore_eos=True), streaming=True, priority=0.1)
        next(iter(low))
        high = llm.generate_async([7, 8], SamplingParams(max_tokens=2, ignore_eos=True), priority=0.9)
        high.result(60)
        assert not low.finished or llm.stats()["preemptions"] == 1
        assert len(low.result(60).outputs[0].token_ids) == 60
        with pytest.raises(RequestError, match="priority"):
            llm.generate_async([7, 8], priority=2)
