"""I22: JSON through xgrammar stays JSON with drafts, and is the text that plain decoding gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.harness import NAME, QWEN, ask, events, qwen_template, service
from tests.server.scripted import LETTERS
from trtllm_replayssm import LLM, MTPDecodingConfig, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.server.grammar import GrammarMask, Grammars
from trtllm_replayssm.runtime.server.protocol.common import JsonSchema, ResponseFormat
from trtllm_replayssm.runtime.server.schema import schema_text
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.text.token_bytes import TokenBytes
from trtllm_replayssm.runtime.text.tokenizer import load_tokenizer

pytest.importorskip("xgrammar", reason="needs xgrammar: pip install xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
DRAFTERS = [None, MTPDecodingConfig(max_draft_len=3), NGramDecodingConfig(max_draft_len=5)]


@pytest.fixture(scope="module", params=DRAFTERS, ids=["plain", "mtp", "ngram"])
def server(request: pytest.FixtureRequest) -> Iterator[Service]:
    with LLM(QWEN, max_seq_len=384, max_batch_size=4, speculative_config=request.param, debug=True) as llm:
        yield service(llm, qwen_template())


def choices(server: Service, **fields: Any) -> Any:
    body = {"model": NAME, "messages": [{"role": "user", "content": "A pet, please."}], "max_tokens": 300, **fields}
    response = ask(server, "/v1/chat/completions", {"response_format": FORMAT, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def pet(server: Service, **fields: Any) -> list[str]:
    return [choice["message"]["content"] for choice in choices(server, **fields)]


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == set(SCHEMA["required"])
    assert value["kind"] in ("cat", "dog") and 0 <= value["age"] <= 150 and len(value["name"]) <= 12
    assert 2 <= len(value["tags"]) <= 3 and set(value["tags"]) <= {True, False}


def test_i22_sampled_json_fits_its_schema_in_every_choice(server: Service) -> None:
    texts = pet(server, n=3, seed=11, temperature=1.0)
    for text in texts:
        check(text)
    assert len(set(texts)) > 1


def test_i22_a_stream_of_json_joins_to_json(server: Service) -> None:
    body = {"model": NAME, "prompt": "A pet:", "max_tokens": 300, "stream": True, "seed": 2, "response_format": FORMAT}
    data = events(ask(server, "/v1/completions", body).text)[:-1]
    check("".join(json.loads(chunk)["choices"][0]["text"] for chunk in data))


def test_i22_any_object_is_an_object(server: Service) -> None:
    for choice in choices(server, response_format={"type": "json_object"}, seed=1, n=4, max_tokens=60, temperature=0.9):
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
        else:  # cut at the length: a legal beginning
            assert text.startswith("{")


def test_i22_greedy_json_is_the_same_with_and_without_drafts() -> None:
    texts = []
    for drafter in DRAFTERS:
        with LLM(QWEN, max_seq_len=384, speculative_config=drafter, debug=True) as llm:
            server = service(llm, qwen_template())
            texts.append(pet(server, temperature=0)[0])
            check(texts[-1])
            if drafter is not None:
                assert llm.stats()["drafted_tokens"]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("drafter", DRAFTERS, ids=["plain", "mtp", "ngram"])
def test_i22_choices_that_lose_their_slots_for_a_while_write_the_same_json(drafter: Any, grammars: Grammars) -> None:
    """Sampled, n = 3, while requests of a higher priority come and take slots; each choice has its own mask."""
    params = SamplingParams(
        n=3, max_tokens=120, seed=5, temperature=1.0, logits_mask=grammars.mask(grammars.compile(text_of(SCHEMA)))
    )
    with LLM(QWEN, max_seq_len=256, max_batch_size=3, speculative_config=drafter, debug=True) as llm:
        want = [output.text for output in llm.generate_async("A pet:", params).result(60).outputs]
        handle = llm.generate_async("A pet:", params, streaming=True, priority=0.1)
        for output in handle:
            if all(choice.token_ids for choice in output.outputs):
                break
        while not handle.finished:
            llm.generate_async([7, 8, 9], SamplingParams(max_tokens=2, n=2), priority=0.9).result(60)
        assert int(str(llm.stats()["preemptions"])) > 1
        assert [choice.text for choice in handle.result(60).outputs] == want
    for text in want:
        check(text)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokens = TokenBytes(load_tokenizer(QWEN))
    return Grammars(tokens, tokens.count, 8192, (0,))


def mask_of(grammars: Grammars) -> GrammarMask:
    return grammars.mask(grammars.compile(text_of(SCHEMA)))


def text_of(schema: dict[str, Any], limit: int = 1 << 16) -> str:
    return schema_text(ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=schema)), limit)


def test_a_mask_looks_ahead_behind_drafts_and_forgets_them(grammars: Grammars) -> None:
    encode = load_tokenizer(QWEN).encode
    mask, ids = mask_of(grammars), encode('{"name": "x", "age": 1, "kind": "dog", "tags": [true, false]}')
    before = mask.allowed([])
    assert before is not None
    for cut in range(len(ids)):
        ahead = mask.allowed(ids[:cut])
        assert ahead is not None and ahead[ids[cut]]
    end = mask.allowed(ids)
    assert end is not None and end.nonzero()[0].tolist() == [0]
    assert mask.allowed([*ids, ids[0]]) is None and mask.allowed([encode("]")[0]]) is None
    assert (mask.allowed([]) == before).all()
    fork = mask.fork()
    for token in ids:
        fork.accept(token)
    over = fork.allowed([])
    assert over is not None and over.nonzero()[0].tolist() == [0]
    fork.accept(0)
    fork.accept(5)  # a request that ignores end tokens goes on; only ends are offered
    assert (fork.allowed([]) == over).all() and (mask.allowed([]) == before).all()


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    encode = load_tokenizer(QWEN).encode
    inside = mask_of(grammars).allowed(encode('{"name": "'))
    assert inside is not None and not inside[1] and not inside[2] and inside[encode("a")[0]]


@pytest.mark.parametrize(
    "schema",
    [{"type": 7}, {"$ref": "#/nowhere"}, {"pattern": "(", "type": "string"}],
)
def test_a_schema_that_does_not_compile_is_refused_by_name(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(text_of(schema))
    assert caught.value.argument == "response_format"


def test_schemas_too_deep_too_long_or_of_too_many_values_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"items": deep}
    refused = ((deep, "64 levels"), ({"enum": ["x" * 5000]}, "4096 bytes"), ({"enum": [0] * 9000}, "8192 values"))
    for schema, limit in refused:
        with pytest.raises(RequestError, match=f"response_format: expected at most {limit}"):
            text_of(schema, 4096)
    with pytest.raises(RequestError, match="response_format"):
        schema_text(ResponseFormat(type="json_schema"), 4096)


def test_a_tokenizer_that_does_not_tell_its_vocabulary_still_works() -> None:
    tokens = TokenBytes(LETTERS)
    assert tokens.count == 0 and tokens.of(0) == b"a"
