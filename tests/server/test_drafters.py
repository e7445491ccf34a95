"""Over HTTP, greedy text, ids, logprobs and usage are the same with multi-token steps as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.bundled import NOISE
from tests.server.harness import NAME, NEMOTRON, QWEN, over_asgi, service
from trtllm_replayssm import LLM, MTPDecodingConfig, NGramDecodingConfig
from trtllm_replayssm.runtime.options import SpeculativeConfig

PROMPTS = ["The history of the", "1 2 3 1 2 3 1 2", "To install a package on a Debian system, you should"]
BODY = {"model": NAME, "max_tokens": 40, "temperature": 0, "logprobs": 2}


def answers(model: Path, drafter: SpeculativeConfig | None) -> tuple[list[Any], list[Any], int]:
    """(choices with texts, choices with ids, drafts accepted) of all prompts in one batch."""
    with LLM(model, max_seq_len=128, speculative_config=drafter, debug=True) as llm:

        async def talk(client: httpx.AsyncClient) -> list[Any]:
            bodies = [{**BODY, "prompt": PROMPTS}, {**BODY, "prompt": PROMPTS, "detokenize": False}]
            return [(await client.post("/v1/completions", json=body)).json() for body in bodies]

        texts, ids = over_asgi(service(llm), talk)
        assert texts["usage"] == ids["usage"] and texts["usage"]["completion_tokens"] == sum(
            len(choice["token_ids"]) for choice in ids["choices"]
        )
        return texts["choices"], ids["choices"], int(str(llm.stats()["accepted_tokens"]))


def decided(choice: Any) -> int:
    """Tokens before the first whose two best candidates are closer than two float32 evaluations may differ."""
    for i, best in enumerate(choice["logprobs"]["top_logprobs"]):
        first, second = sorted(best.values(), reverse=True)
        if first - second <= NOISE:
            return i
    return len(choice["token_ids"])


NGRAM, MTP = NGramDecodingConfig(max_draft_len=5), MTPDecodingConfig(max_draft_len=3)


@pytest.mark.parametrize(("model", "drafters"), [(QWEN, [NGRAM, MTP]), (NEMOTRON, [NGRAM])], ids=["qwen", "nemotron"])
def test_greedy_answers_are_the_same_with_drafts_and_without(model: Path, drafters: list[SpeculativeConfig]) -> None:
    texts, ids, _ = answers(model, None)
    compared = 0
    for drafter in drafters:
        other_texts, other_ids, accepted = answers(model, drafter)
        assert accepted > 0
        for text, plain, other_text, other in zip(texts, ids, other_texts, other_ids, strict=True):
            count = decided(plain)
            compared += count
            assert other["token_ids"][:count] == plain["token_ids"][:count]
            scores, others = plain["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"]
            assert others[:count] == pytest.approx(scores[:count], abs=1e-3)
            if count == len(plain["token_ids"]):
                assert (other_text["text"], other_text["finish_reason"]) == (text["text"], text["finish_reason"])
                assert len(others) == len(scores)
    assert compared > 100 * len(drafters)
