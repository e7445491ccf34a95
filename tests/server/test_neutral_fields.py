"""What OpenAI's clients send without meaning anything by it: nulls, defaults, and messages as they were received."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.harness import bench
from tests.server.harness import NAME, ask
from tests.server.scripted import byte_tokenizer, serving
from trtllm_replayssm.runtime.server.protocol.chat import ChatRequest
from trtllm_replayssm.runtime.server.protocol.common import Body
from trtllm_replayssm.runtime.server.protocol.completions import CompletionRequest
from trtllm_replayssm.runtime.server.protocol.responses import ResponsesRequest
from trtllm_replayssm.runtime.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from trtllm_replayssm.runtime.server.service import Service

USER = {"role": "user", "content": "ab"}
BASES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"model": NAME, "prompt": "ab", "seed": 3}),
    "/v1/chat/completions": (ChatRequest, {"model": NAME, "messages": [USER], "seed": 3}),
    "/v1/responses": (ResponsesRequest, {"model": NAME, "input": "ab", "seed": 3}),
    "/tokenize": (TokenizeRequest, {"prompt": "ab"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2]}),
}
# A reply as openai's `message.model_dump()` gives it, and an output item of /v1/responses.
DUMPED = {
    "content": "ba", "refusal": None, "role": "assistant", "annotations": None, "audio": None, "function_call": None,
    "tool_calls": None,
}  # fmt: skip
ITEM = {
    "id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "phase": None,
    "content": [{"type": "output_text", "text": "ba", "annotations": [], "logprobs": None}],
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Service]:
    machine = bench(tokenizer=byte_tokenizer(), vocab=256, max_seq_len=128)
    with serving(machine, max_tokens=6) as made:
        yield made


def content(answer: dict[str, Any]) -> Any:
    """What an answer says, without its id and times."""
    return [answer.get(name) for name in ("choices", "tokens", "prompt", "temperature", "top_p")] + [
        [part["text"] for item in answer.get("output", ()) for part in item["content"]]
    ]


@pytest.mark.parametrize("path", BASES)
def test_null_means_the_default_for_every_optional_field(server: Service, path: str) -> None:
    kind, base = BASES[path]
    plain = ask(server, path, base).json()
    for name, field in kind.model_fields.items():
        if field.is_required() or name in base:
            continue
        answer = ask(server, path, {**base, name: None})
        assert answer.status_code == 200, (name, answer.text)
        assert content(answer.json()) == content(plain), name


def test_all_nulls_at_once_sample_as_the_defaults_do(server: Service) -> None:
    """Temperature and top_p both null are 1 and 1, which is no greedy decoding."""
    base = BASES["/v1/completions"][1]
    seeds = [ask(server, "/v1/completions", {**base, "seed": s, "temperature": None, "top_p": None}) for s in range(8)]
    assert len({answer.json()["choices"][0]["text"] for answer in seeds}) > 1


@pytest.mark.parametrize("inner", [{"include_usage": None}, {"include_obfuscation": None}, {}])
def test_null_means_the_default_in_inner_objects(server: Service, inner: dict[str, Any]) -> None:
    body = {**BASES["/v1/chat/completions"][1], "stream": True, "stream_options": inner}
    assert ask(server, "/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    "turn",
    [
        DUMPED,
        {**DUMPED, "annotations": [], "tool_calls": []},
        {**DUMPED, "content": None},
        {"role": "assistant", "content": "ba", "reasoning_content": None, "name": None},
    ],
)
def test_a_reply_may_be_sent_back_as_it_was_received(server: Service, turn: dict[str, Any]) -> None:
    body = {"model": NAME, "messages": [USER, turn, USER], "seed": 3}
    bare = {"role": "assistant", "content": turn["content"] or ""}
    answers = [ask(server, "/v1/chat/completions", {**body, "messages": [USER, m, USER]}) for m in (turn, bare)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert content(answers[0].json()) == content(answers[1].json())


def test_an_output_item_may_be_sent_back_as_it_was_received(server: Service) -> None:
    body = {"model": NAME, "input": [USER, ITEM, USER]}
    assert ask(server, "/v1/responses", body).status_code == 200
    first = ask(server, "/v1/responses", {"model": NAME, "input": "ab"}).json()
    assert ask(server, "/v1/responses", {"model": NAME, "input": [USER, *first["output"], USER]}).status_code == 200


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/chat/completions", {name: value}) for name, value in [
        ("store", False), ("parallel_tool_calls", True), ("parallel_tool_calls", False), ("metadata", {"a": "b"}),
        ("service_tier", "auto"), ("modalities", ["text"]), ("prompt_cache_key", "x"), ("safety_identifier", "x"),
        ("function_call", "none"), ("tools", []), ("reasoning_effort", "none"),
    ]),
    *(("/v1/responses", {name: value}) for name, value in [
        ("store", False), ("parallel_tool_calls", True), ("truncation", "disabled"), ("metadata", {"a": "b"}),
        ("background", False), ("include", []), ("service_tier", "default"), ("previous_response_id", None),
        ("prompt_cache_key", "x"), ("safety_identifier", "x"), ("tool_choice", "none"),
    ]),
    ("/v1/completions", {"suffix": None}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), NEUTRAL)
def test_a_field_that_asks_for_nothing_is_accepted(server: Service, path: str, fields: dict[str, Any]) -> None:
    base = BASES[path][1]
    plain, answer = ask(server, path, base), ask(server, path, {**base, **fields})
    assert answer.status_code == 200, answer.text
    assert content(answer.json()) == content(plain.json())


def test_responses_give_metadata_back(server: Service) -> None:
    body = {**BASES["/v1/responses"][1], "metadata": {"a": "b"}}
    assert ask(server, "/v1/responses", body).json()["metadata"] == {"a": "b"}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("/v1/chat/completions", {name: value}, name) for name, value in [
        ("store", True), ("metadata", {"a": 1}), ("metadata", {str(i): "x" for i in range(17)}), ("audio", {}),
        ("modalities", ["text", "audio"]), ("service_tier", "flex"), ("function_call", "auto"), ("functions", [{}]),
        ("parallel_tool_calls", "no"), ("reasoning_effort", "high"), ("prediction", {"type": "content"}), ("foo", None),
        ("web_search_options", {}),
    ]),
    *(("/v1/chat/completions", {"messages": [USER, {**DUMPED, name: value}]}, "messages") for name, value in [
        ("tool_calls", [{"id": "x"}]), ("function_call", {"name": "f"}), ("audio", {"id": "x"}), ("refusal", "no"),
        ("annotations", [{}]), ("reasoning_content", "hm"),
    ]),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages"),
    *(("/v1/responses", {name: value}, name) for name, value in [
        ("truncation", "auto"), ("background", True), ("include", ["reasoning.encrypted_content"]),
        ("service_tier", "priority"), ("conversation", "x"), ("top_logprobs", 2),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_a_field_that_asks_for_what_is_not_built_is_refused_by_name(
    server: Service, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = ask(server, path, {**BASES[path][1], **fields})
    found = answer.json()["error"]
    assert (answer.status_code, found["param"]) == (400, param), answer.text
    turn = fields["messages"][-1] if param == "messages" else {}
    changed = [name for name, value in turn.items() if name != "role" and value != DUMPED.get(name)]
    assert (changed[0] if changed else param) in found["message"]
