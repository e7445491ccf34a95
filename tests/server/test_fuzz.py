"""Whatever is sent, no answer is a 5xx, every answer is JSON or a stream, and nothing is left running."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any, NoReturn

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from tests.runtime.harness import Bench, bench
from tests.server.harness import NAME, over_asgi, wait_for
from tests.server.scripted import byte_tokenizer, serving
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.runtime.server.app import make_app
from trtllm_replayssm.runtime.server.protocol.chat import ChatCompletion, ChatRequest
from trtllm_replayssm.runtime.server.protocol.common import Part
from trtllm_replayssm.runtime.server.protocol.completions import Completion, CompletionRequest
from trtllm_replayssm.runtime.server.protocol.responses import ResponsesRequest, ResponsesResponse
from trtllm_replayssm.runtime.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from trtllm_replayssm.runtime.server.service import Service

BODIES = 10_000
LIMITS = {"max_tokens": 6, "max_n": 4, "max_prompts": 4}
MESSAGES = [{"role": "user", "content": "ab"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": NAME, "prompt": "ab"},
    "/v1/chat/completions": {"model": NAME, "messages": MESSAGES},
    "/v1/responses": {"model": NAME, "input": "ab"},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1, 2]},
}
KINDS = (CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
FIELDS = sorted({name for kind in KINDS for name in kind.model_fields} | {"suffix"})
ANSWERS: dict[str, type[Part]] = {
    "/v1/completions": Completion, "/v1/chat/completions": ChatCompletion, "/v1/responses": ResponsesResponse,
    "/tokenize": TokenizeResponse, "/detokenize": DetokenizeResponse,
}  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, -1, 7, 1 << 31, 1 << 63, 1 << 64, 10**400, 0.0, 0.5, 1.0, -0.0, 1e-320, 1e-30, 1e308,
    -1e308, "", "a", "b", "\x00", "é€", "\ud800", "a" * 300, "{{ 1 }}", "none", "auto", [], [0], [1, 2, 3], [63], [64],
    [-1], ["a"], ["a", "b"], [""], [[1], [2]], [[]], [None], ["a"] * 40, {}, {"a": 1}, {"0": 1.5},
    {"5": -100, "6": 100}, {"1": "x"}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"},
    {"include_usage": True},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}, {"format": {"type": "text"}},
    MESSAGES, [{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"type": "x"}],
    {"enable_thinking": True, "x": [1]},
]  # fmt: skip
DAMAGE = (b"", b"NaN", b"Infinity", b"1e999", b"\xff", b"\\ud800", b"]" * 50, b"[" * 5000)


def random_body(rng: random.Random, base: dict[str, Any]) -> bytes:
    """A valid body with a few fields replaced; sometimes its text is damaged as well."""
    body = {} if rng.random() < 0.03 else dict(base)
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 6))):
        name = rng.choice(FIELDS) if rng.random() < 0.97 else "".join(rng.choices("abc_\u00e9", k=5))
        body[name] = rng.choice(VALUES)
    if rng.random() < 0.03:
        body["x"] = [[]] * rng.randrange(300)
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        at, length = rng.randrange(len(data)), rng.randrange(6)
        data = data[:at] + rng.choice(DAMAGE) + data[at + length :]
    return data


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def check(path: str, data: bytes, response: httpx.Response) -> None:
    assert response.status_code < 500 and response.status_code not in (422, 429), (path, data, response.text)
    if response.headers["content-type"].startswith("text/event-stream"):
        assert '{"error":' not in response.text or response.text.count('"choices"'), (path, data, response.text)
        return
    content = json.loads(response.text, parse_constant=no_constant)
    if response.status_code == 200:
        ANSWERS[path].model_validate(content)
        assert content.keys() <= ANSWERS[path].model_fields.keys(), (path, data)
    else:
        assert set(content["error"]) == {"message", "type", "param", "code"}, (path, data)


def idle(server: Service) -> None:
    """Nothing runs and nothing is held."""
    wait_for(lambda: server.llm.load().free_slots == 4, "free slots")
    assert server.gate.inside == 0 and server.llm.load().waiting == 0 and server.llm.failure is None


def machine() -> Bench:
    return bench("ngram", tokenizer=byte_tokenizer(), vocab=256, max_seq_len=128)


@pytest.mark.slow
def test_ten_thousand_random_bodies_cause_no_5xx_and_leave_nothing_behind() -> None:
    rng = random.Random(20)
    with serving(machine(), **LIMITS) as server:

        async def talk(client: httpx.AsyncClient) -> int:
            good = 0
            for _ in range(BODIES):
                path = rng.choice(list(BASES))
                data = random_body(rng, BASES[path])
                response = await client.post(path, content=data, headers={"Content-Type": "application/json"})
                check(path, data, response)
                good += response.status_code == 200
            return good

        good = over_asgi(server, talk)
        idle(server)
    assert BODIES // 10 < good < BODIES * 9 // 10  # neither all refused nor hardly any


@pytest.mark.slow
def test_nothing_that_the_openapi_description_allows_is_a_5xx() -> None:
    checked = {}
    with serving(machine(), **LIMITS) as server:
        with suppress(UnsupportedError):  # where xgrammar is not installed
            server.guided.prepare()
        schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(server))
        for found in schema.get_all_operations():
            operation = found.ok()
            checked[operation.label] = probe(operation)
        idle(server)
    assert {f"POST {path}" for path in BASES} | {"GET /health_generate", "GET /metrics"} <= checked.keys()
    assert all(200 in statuses for label, statuses in checked.items() if "model" not in label)
    assert {400, 404} & set().union(*checked.values())


def probe(operation: Any) -> set[int]:
    """Statuses of an operation over the cases that schemathesis makes of its description.

    Most bodies with all their fields are refused for one of them, so half of the bodies are a valid one with a few
    fields of a random one: then some pass, whatever else is random.
    """
    statuses = set()
    base = BASES.get(operation.path, {})

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(case=operation.as_strategy(), few=st.none() | st.sets(st.integers(0, 40), max_size=2))
    def run(case: Any, few: set[int] | None) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = NAME  # any other string is a 404 before anything is looked at
        if isinstance(case.body, dict) and few is not None:
            case.body = base | {name: case.body[name] for i, name in enumerate(sorted(case.body)) if i in few}
        response = case.call()
        case.validate_response(response, checks=(not_a_server_error,))
        assert response.status_code != 422
        statuses.add(response.status_code)

    run()
    return statuses
