"""echo with logprobs: the scores of a prompt's own tokens are those of forwards over its beginnings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.bundled import NOISE
from tests.e2e.greedy import generate
from tests.runtime.fake_session import hash_model
from tests.runtime.harness import bench
from tests.server.harness import NAME, NEMOTRON, QWEN, ask, events, service
from tests.server.scripted import LETTERS, serving
from trtllm_replayssm import LLM, MTPDecodingConfig, NGramDecodingConfig
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

TEXT = "And the LORD said unto Moses, Go unto the LORD"
TOP = 3
SERVERS = [(QWEN, None), (QWEN, MTPDecodingConfig(max_draft_len=3)), (NEMOTRON, NGramDecodingConfig(max_draft_len=4))]


@pytest.fixture(scope="module", params=SERVERS, ids=["qwen", "qwen-mtp", "nemotron-ngram"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Service, TorchSession]]:
    model, drafter = request.param
    session = TorchSession.from_checkpoint(
        Checkpoint.open(model), ReplayConfig(window=16, max_step_tokens=1), PoolConfig(slots=1, max_seq_len=256)
    )
    with LLM(model, max_seq_len=256, max_batch_size=4, speculative_config=drafter, debug=True) as llm:
        yield service(llm), session


def reference(session: TorchSession, ids: list[int]) -> list[NDArray[np.float64]]:
    """Log-probabilities [V] behind each beginning of ids, each from a forward of its own."""
    found = []
    for end in range(1, len(ids)):
        logits = generate(session, ids[:end], 1).prompt_logits
        assert logits is not None
        scores = logits.astype(np.float64)
        scores -= scores.max()
        found.append(scores - np.log(np.exp(scores).sum()))
    return found


def completion(server: Service, **fields: Any) -> dict[str, Any]:
    answer = ask(server, "/v1/completions", {"model": NAME, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_scores_of_a_prompt_agree_with_the_reference_session(served: tuple[Service, TorchSession]) -> None:
    server, session = served
    ids = ask(server, "/tokenize", {"prompt": TEXT}).json()["tokens"]
    whole = completion(server, prompt=TEXT, echo=True, logprobs=TOP, max_tokens=0)
    (choice,) = whole["choices"]
    scores, expected = choice["logprobs"], reference(session, ids)
    assert choice["text"] == TEXT and choice["finish_reason"] == "length" and len(ids) > 10
    assert whole["usage"]["prompt_tokens"] == len(ids) and whole["usage"]["completion_tokens"] == 0
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    ours = np.array(scores["token_logprobs"][1:])
    theirs = np.array([row[token] for row, token in zip(expected, ids[1:], strict=True)])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=NOISE)
    for best, row in zip(scores["top_logprobs"][1:], expected, strict=True):
        np.testing.assert_allclose(sorted(best.values()), np.sort(row)[-TOP:], rtol=0, atol=NOISE)
    assert "".join(scores["tokens"]) == TEXT
    assert [TEXT[at:].startswith(text) for at, text in zip(scores["text_offset"], scores["tokens"], strict=True)]


def test_what_follows_the_prompt_is_what_follows_without_echo(served: tuple[Service, TorchSession]) -> None:
    server, _ = served
    fields = {"prompt": [TEXT, "1"], "logprobs": TOP, "max_tokens": 6, "n": 2}
    for extra in ({}, {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5}):
        plain, echoed = (completion(server, **fields, echo=echo, **extra) for echo in (False, True))
        assert echoed["usage"] == plain["usage"]
        for left, right in zip(plain["choices"], echoed["choices"], strict=True):
            prompt = fields["prompt"][left["index"] // 2]
            assert right["text"] == prompt + left["text"]
            count = len(left["logprobs"]["tokens"])
            assert "".join(right["logprobs"]["tokens"][:-count]) == prompt
            assert right["logprobs"]["tokens"][-count:] == left["logprobs"]["tokens"]
            scores = (choice["logprobs"]["token_logprobs"][-count:] for choice in (left, right))
            np.testing.assert_allclose(*scores, rtol=0, atol=NOISE)
            offsets = [at - len(prompt) for at in right["logprobs"]["text_offset"][-count:]]
            assert offsets == left["logprobs"]["text_offset"]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_stream_says_the_same(served: tuple[Service, TorchSession], max_tokens: int) -> None:
    server, _ = served
    fields = {"prompt": [TEXT, "1"], "logprobs": 1, "echo": True, "max_tokens": max_tokens, "n": 2}
    whole = completion(server, **fields)
    body = {"model": NAME, "temperature": 0, **fields, "stream": True, "stream_options": {"include_usage": True}}
    data = events(ask(server, "/v1/completions", body).text)
    assert data[-1] == "[DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "text_offset"):
            assert [item for part in parts for item in part["logprobs"][name]] == choice["logprobs"][name]
        scores = [score for part in parts for score in part["logprobs"]["token_logprobs"]]
        assert scores[0] is None
        np.testing.assert_allclose(scores[1:], choice["logprobs"]["token_logprobs"][1:], rtol=0, atol=NOISE)


def test_end_tokens_in_a_prompt_are_scored_like_others_and_truncation_counts() -> None:
    model = hash_model(64)
    with serving(bench("ngram", model=model, vocab=64, tokenizer=LETTERS, eos_ids=(2,))) as server:
        ids = [1, 2, 3, 2, 2, 11, 5, 3, 2, 2, 11]
        fields = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
        (choice,) = completion(server, **fields)["choices"]
        (cut,) = completion(server, **fields, truncate_prompt_tokens=4)["choices"]
        assert cut["text"] == LETTERS.decode(ids[-4:], False) and len(cut["logprobs"]["tokens"]) == 4
        for kept, scores in ((ids, choice["logprobs"]), (ids[-4:], cut["logprobs"])):
            assert scores["top_logprobs"] is None
            for i in range(1, len(kept)):
                logits = model(kept[:i]).astype(np.float64)
                expected = logits[kept[i]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
                assert scores["token_logprobs"][i] == pytest.approx(expected, abs=1e-5)
        (single,) = completion(server, prompt=[5], echo=True, logprobs=2, max_tokens=0)["choices"]
        assert single["logprobs"]["token_logprobs"] == [None] and single["text"] == LETTERS.decode([5], False)
        assert server.gate.inside == 0 and server.llm.load().free_slots == 4
