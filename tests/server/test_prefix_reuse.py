"""A repeated prompt over HTTP with block reuse on: same answer, and the cached tokens are told in usage and metrics."""

from __future__ import annotations

from tests.server.harness import NAME, QWEN, ask, over_asgi, qwen_template, service
from trtllm_replayssm import LLM, KvCacheConfig, MTPDecodingConfig

PROMPT = "The handler sends the log records to the appropriate destination, whatever the level of the record is. " * 3


def test_a_repeated_prompt_is_served_from_the_prefix_cache() -> None:
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=16)
    drafter = MTPDecodingConfig(max_draft_len=3)
    with LLM(QWEN, max_seq_len=256, kv_cache_config=cache, speculative_config=drafter) as llm:
        server = service(llm, qwen_template())
        body = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
        first, second = (ask(server, "/v1/completions", body).json() for _ in range(2))
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 32 and cached % 16 == 0
        told = ask(server, "/v1/responses", {"model": NAME, "input": PROMPT, "max_output_tokens": 4}).json()["usage"]
        assert "cached_tokens" in told["input_tokens_details"]
        lines = over_asgi(server, lambda client: client.get("/metrics")).text.splitlines()
        assert f"replayssm_prefix_hit_tokens_total {float(cached)}" in lines
