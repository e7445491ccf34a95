"""What is refused, how: OpenAI error objects with the field's name; sizes, keys, queues."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import bench, scripted
from tests.server.harness import NAME, ask, live, over_asgi, service, wait_for
from tests.server.scripted import LETTERS, serving, slow
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.server.errors import MAX_MESSAGE, error_object
from trtllm_replayssm.runtime.server.service import Service

COMPLETION = {"model": NAME, "prompt": "a"}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
RESPONSES = {"model": NAME, "input": "a"}


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which must have exactly OpenAI's keys."""
    assert response.status_code == status, response.text
    content = response.json()
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    return dict(content["error"])


WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(("/v1/completions", {**COMPLETION, name: value}, name) for name, value in [
        ("foo", 1), ("suffix", "x"), ("best_of", 2), ("use_beam_search", True), ("n", 0), ("n", 17), ("n", "1"),
        ("n", True), ("n", 1.5), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "9"), ("min_tokens", -1),
        ("temperature", -0.1), ("temperature", 1e9), ("temperature", "hot"), ("top_p", 1.1), ("top_k", -1),
        ("min_p", 2), ("seed", 1 << 64), ("seed", 0.5), ("logprobs", 21), ("logprobs", True), ("stop", [""]),
        ("stop", ["x"] * 17), ("stop", "x" * 257), ("stop", 5), ("stop_token_ids", [-1]), ("stop_token_ids", [64]),
        ("stop_token_ids", [0] * 17), ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}), ("logit_bias", {"99": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"-1": 1}),
        ("logit_bias", [1]), ("truncate_prompt_tokens", 0), ("stream", "yes"), ("user", 5), ("prompt", []),
        ("prompt", [[]]), ("prompt", [64]), ("prompt", [-1]), ("prompt", ["a"] * 65), ("prompt", [1, "a"]),
        ("prompt", {"text": "a"}), ("prompt", None), ("prompt", [0] * 64), ("response_format", {"type": "xml"}),
        ("response_format", "json"), ("stream_options", {"include_usage": True}), ("tools", []),
    ]),
    ("/v1/completions", {**COMPLETION, "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("/v1/completions", {**COMPLETION, "echo": True, "detokenize": False}, "echo"),
    *(("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 1, "max_tokens": 0, "prompt": prompt}, "prompt")
      for prompt in ([64], [[]], [[0], [64]], "", [1] * 64)),
    ("/v1/completions", {**COMPLETION, "priority": 1.1}, "priority"),
    ("/v1/completions", {**COMPLETION, "priority": "high"}, "priority"),
    ("/v1/completions", {**COMPLETION, "stop": "x", "detokenize": False}, "stop"),
    ("/v1/completions", {"prompt": "a"}, "model"),
    ("/v1/completions", {**COMPLETION, "stream": True, "stream_options": {"x": 1}}, "stream_options"),
    *(("/v1/chat/completions", {**CHAT, name: value}, name) for name, value in [
        ("tools", [{"type": "function"}]), ("tool_choice", "auto"), ("functions", []), ("messages", []),
        ("messages", "hi"), ("messages", [{"role": "tool", "content": "x"}]), ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("top_logprobs", 2), ("logprobs", 2), ("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"messages": 1}),
        ("prompt", "x"), ("max_completion_tokens", 0),
    ]),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    *(("/v1/responses", {**RESPONSES, name: value}, name) for name, value in [
        ("store", True), ("tools", [{}]), ("tool_choice", "required"), ("previous_response_id", "resp_1"),
        ("input", []), ("input", [{"role": "user", "content": [{"type": "input_image"}]}]), ("max_tokens", 3),
        ("text", {"format": {"type": "grammar"}}), ("reasoning", {"effort": "high"}),
    ]),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [64]}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
]  # fmt: skip


def test_400_names_the_field_and_nothing_is_left_running() -> None:
    with serving(scripted([0, 1, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:

        async def talk(client: httpx.AsyncClient) -> None:
            for path, body, field in WRONG:
                found = error(await client.post(path, json=body), 400)
                assert (found["type"], found["param"]) == ("invalid_request_error", field), (path, body, found)
                assert field in found["message"]
            assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

        over_asgi(server, talk)
        assert server.gate.inside == 0 and server.llm.load().free_slots == 4


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 200_000, b'{"model": "\\ud800", "prompt": "a"}',
     b'{"model": "tiny", "prompt": "\\ud800"}', b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
     b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
     b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 6000 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_requests_are_400(content: bytes) -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:
        headers = {"Content-Type": "application/json"}
        response = over_asgi(server, lambda client: client.post("/v1/completions", content=content, headers=headers))
        assert error(response, 400)["type"] == "invalid_request_error"


def test_values_of_the_body_are_not_echoed_at_length() -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:
        for field, value in (("x" * 90_000, 1), ("model", "m" * 900), ("stop", [[9] * 9999])):
            assert len(ask(server, "/v1/completions", {**COMPLETION, field: value}).content) < 2000
    assert len(error_object(400, "x" * 5000)["error"]["message"]) == MAX_MESSAGE


def test_paths_and_methods_that_do_not_exist() -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:

        async def talk(client: httpx.AsyncClient) -> None:
            error(await client.get("/v2/x"), 404)
            error(await client.get("/v1/completions"), 405)
            assert error(await client.get("/v1/models/other"), 404)["code"] == "model_not_found"
            for path, body in (("/v1/completions", COMPLETION), ("/tokenize", {"prompt": "a"})):
                assert error(await client.post(path, json={**body, "model": "other"}), 404)["param"] == "model"

        over_asgi(server, talk)


def test_a_body_over_the_limit_is_413_with_and_without_a_declared_length() -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,)), body_bytes=1000) as server:

        async def pieces() -> Any:
            for _ in range(50):
                yield b" " * 100

        for content in (b" " * 1001, pieces()):
            response = over_asgi(server, lambda c, data=content: c.post("/v1/completions", content=data))
            assert error(response, 413)["code"] == "request_too_large"


def test_headers_over_the_limit_are_431_and_far_over_it_the_connection_ends() -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,)), header_bytes=2000) as server, live(server) as url:
        assert httpx.get(f"{url}/health", headers={"x": "y" * 1000}).status_code == 200
        error(httpx.get(f"{url}/health", headers={"x": "y" * 2000}), 431)
        error(httpx.get(f"{url}/health?{'y' * 2000}"), 431)
        with suppress(httpx.TransportError):  # the connection may be closed while the client still writes
            assert httpx.get(f"{url}/health", headers={"x": "y" * 200_000}).status_code in (400, 431)
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_body_that_does_not_come_is_408() -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,)), body_seconds=1) as server, live(server):
        connection = socket.create_connection(("127.0.0.1", server.settings.port), timeout=10)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        connection.close()


def test_an_api_key_guards_all_that_generates_or_reads_tokens() -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,)), api_key="secret") as server:

        async def talk(client: httpx.AsyncClient) -> None:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"},
                            {"Authorization": "Basic secret"}, {"Authorization": b"Bearer \xff\xfe"}):  # fmt: skip
                for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
                    found = error(await client.post(path, json=COMPLETION, headers=headers), 401)
                    assert found["code"] == "invalid_api_key" and "secret" not in found["message"]
                for path in ("/v1/models", "/health_generate", "/perf_metrics", "/openapi.json", "/nowhere"):
                    error(await client.get(path, headers=headers), 401)
            for path in ("/", "/health", "/version", "/metrics", "/prometheus/metrics", "/status.json"):
                assert (await client.get(path)).status_code == 200
            good = {"Authorization": "Bearer secret"}
            assert (await client.post("/v1/completions", json=COMPLETION, headers=good)).status_code == 200

        over_asgi(server, talk)


def test_a_full_queue_is_429_with_retry_after_and_opens_again() -> None:
    machine = bench(model=slow(hash_model(24), 0.005), eos_ids=(), slots=1, max_seq_len=3000)
    with serving(machine, max_queue_size=2) as server, live(server) as url:
        body = {"model": NAME, "prompt": [1], "max_tokens": 2500, "detokenize": False, "stream": True}
        with httpx.Client(base_url=url, timeout=20) as client:
            requests = [client.build_request("POST", "/v1/completions", json=body) for _ in range(3)]
            held = [client.send(request, stream=True) for request in requests]
            refused = client.post("/v1/completions", json=body)
            assert error(refused, 429)["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
            assert client.get("/status.json").json()["waiting"] == 2
            for response in held:
                response.close()
            wait_for(lambda: server.gate.inside == 0, "an empty gate")
            assert client.post("/v1/completions", json={**body, "max_tokens": 1}).status_code == 200
        assert server.gate.refused == 1


def test_a_server_that_drains_refuses_and_says_so() -> None:
    with serving(bench()) as server:

        async def talk(client: httpx.AsyncClient) -> None:
            await server.drain()
            body = {"model": NAME, "prompt": [1], "detokenize": False}
            refused = await client.post("/v1/completions", json=body)
            assert error(refused, 503)["code"] == "server_stopping" and int(refused.headers["Retry-After"]) >= 1
            for path in ("/health", "/health_generate"):
                unready = await client.get(path)
                assert error(unready, 503)["code"] == "server_stopping" and int(unready.headers["Retry-After"]) >= 1
            assert (await client.get("/status.json")).json()["stopping"] is True

        over_asgi(server, talk)


@pytest.mark.parametrize(
    ("prompts", "n", "status"), [(4, 1, 200), (2, 2, 200), (5, 1, 400), (3, 2, 400), (4, 2, 400)]
)
def test_one_call_that_no_empty_server_takes_is_refused_at_once(prompts: int, n: int, status: int) -> None:
    with serving(bench(eos_ids=(), slots=2), max_queue_size=2) as server:
        body = {"model": NAME, "prompt": [[1]] * prompts, "n": n, "max_tokens": 3, "detokenize": False}
        answer = ask(server, "/v1/completions", body)
        if status == 200:
            assert len(answer.json()["choices"]) == prompts * n
        else:
            found = error(answer, 400)
            assert found["param"] == "n"
            assert "at most 4 choices (max_batch_size 2 + max_queue_size 2)" in found["message"]
        assert server.gate.inside == 0 and server.gate.refused == 0


def test_an_engine_that_stopped_is_500_and_unhealthy() -> None:
    def broken(tokens: Any) -> Any:
        raise OSError("the device is gone")

    with serving(bench(model=broken)) as server:

        async def talk(client: httpx.AsyncClient) -> None:
            body = {"model": NAME, "prompt": [1], "detokenize": False}
            found = error(await client.post("/v1/completions", json=body), 500)
            assert found["type"] == "server_error" and "device" not in found["message"]
            error(await client.get("/health"), 503)
            error(await client.get("/health_generate"), 503)
            error(await client.post("/v1/completions", json=body), 500)
            streamed = await client.post("/v1/completions", json={**body, "stream": True})
            assert streamed.status_code == 500 and json.loads(streamed.text)["error"]["type"] == "server_error"

        over_asgi(server, talk)
        assert server.gate.inside == 0


def test_a_model_without_tokenizer_or_template_says_so() -> None:
    with LLM.from_engine(bench().engine) as llm:
        server: Service = service(llm)
        assert error(ask(server, "/v1/completions", COMPLETION), 400)["param"] == "prompt"
        assert error(ask(server, "/v1/chat/completions", CHAT), 400)["param"] == "messages"
        ids = ask(server, "/v1/completions", {"model": NAME, "prompt": [1], "max_tokens": 3, "logprobs": 1}).json()
        assert ids["choices"][0]["text"] == "" and ids["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        assert llm.generate([1], SamplingParams(max_tokens=2)).outputs[0].length <= 2  # type: ignore[union-attr]
