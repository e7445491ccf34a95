"""Whatever a client sends within the body limit, the event loop goes on: others are served meanwhile.

The longest stall is the longest time between two beats of the loop, counted only as far as this process used a
processor in it: another process that takes the machine does not make a request look bad. A body is read in one call of
`json`, which holds every thread: where that alone takes long just then, twice its time is allowed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx
import pytest
import uvicorn

from tests.runtime.harness import Bench, bench
from tests.server.harness import NAME, client_of, service
from tests.server.scripted import byte_tokenizer, serving
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.server.serve import uvicorn_config
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.text.chat_template import ChatTemplate

STALL_SECONDS = 0.25
BODY_BYTES = 4 << 20
PAUSE = 0.005
MODEL = f'"model":"{NAME}"'
MESSAGE = '{"role":"user","content":"a"}'


def filled(head: str, item: str, tail: str) -> str:
    """As many items as a body of BODY_BYTES holds."""
    return head + ",".join([item] * ((BODY_BYTES - len(head) - len(tail)) // (len(item) + 1))) + tail


def text(head: str, piece: str, tail: str) -> str:
    """As much text as a body of BODY_BYTES holds."""
    return head + piece * ((BODY_BYTES - len(head) - len(tail)) // len(piece.encode())) + tail


def keys(head: str, tail: str) -> str:
    """As many different keys as fit."""
    return head + ",".join(f'"k{i}":1' for i in range(340_000)) + tail


def completion(fields: str) -> str:
    return "{" + MODEL + ',"max_tokens":2,' + fields


def chat(fields: str) -> str:
    return "{" + MODEL + ',"max_tokens":2,' + fields


COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SHAPES: dict[str, tuple[str, Callable[[], str]]] = {
    "prompt of nulls": (COMPLETIONS, lambda: filled(completion('"prompt":['), "null", "]}")),
    "prompt of fractions": (COMPLETIONS, lambda: filled(completion('"prompt":['), "1.5", "]}")),
    "prompt of ids": (COMPLETIONS, lambda: filled(completion('"prompt":['), "5", "]}")),
    "prompt of ids that do not exist": (COMPLETIONS, lambda: filled(completion('"prompt":['), "999", "]}")),
    "prompt of ids, cut": (COMPLETIONS, lambda: filled(completion('"truncate_prompt_tokens":9,"prompt":['), "5", "]}")),
    "prompts of ids": (COMPLETIONS, lambda: filled(
        completion('"prompt":['), "[" + ",".join(["5"] * 32_000) + "]", "]}")),
    "lists of one id": (COMPLETIONS, lambda: filled(completion('"prompt":['), "[5]", "]}")),
    "empty lists": (COMPLETIONS, lambda: filled(completion('"prompt":['), "[]", "]}")),
    "short prompts": (COMPLETIONS, lambda: filled(completion('"prompt":['), '"a"', "]}")),
    "long prompts": (COMPLETIONS, lambda: filled(completion('"prompt":['), '"' + "a b" * 21_000 + '"', "]}")),
    "one long prompt": (COMPLETIONS, lambda: text(completion('"prompt":"'), "hello ", '"}')),
    "one long word": (COMPLETIONS, lambda: text(completion('"prompt":"'), "a", '"}')),
    "one long prompt, cut": (COMPLETIONS, lambda: text(
        completion('"truncate_prompt_tokens":9,"prompt":"'), "é", '"}')),
    "escapes": (COMPLETIONS, lambda: text(completion('"prompt":"'), "\\n", '"}')),
    "quotes": (COMPLETIONS, lambda: text(completion('"prompt":"'), '\\"', '"}')),
    "unknown keys": (COMPLETIONS, lambda: keys(completion(""), "}")),
    "biases": (COMPLETIONS, lambda: keys(completion('"prompt":"a","logit_bias":{'), "}}")),
    "stops": (COMPLETIONS, lambda: filled(completion('"prompt":"a","stop":['), "null", "]}")),
    "stop tokens": (COMPLETIONS, lambda: filled(completion('"prompt":"a","stop_token_ids":['), "null", "]}")),
    "nested lists": (COMPLETIONS, lambda: completion('"prompt":') + "[" * (1 << 21)),
    "nested objects": (COMPLETIONS, lambda: text(completion('"prompt":'), '{"a":', "")),
    "spaces": (COMPLETIONS, lambda: completion('"prompt":"a"') + " " * (BODY_BYTES - 60) + "}"),
    "a long number": (COMPLETIONS, lambda: completion('"seed":') + "9" * (BODY_BYTES - 60) + "}"),
    "messages": (CHAT, lambda: filled(chat('"messages":['), MESSAGE, "]}")),
    "messages without content": (CHAT, lambda: filled(chat('"messages":['), '{"role":"user"}', "]}")),
    "messages of nulls": (CHAT, lambda: filled(chat('"messages":['), "null", "]}")),
    "parts": (CHAT, lambda: filled(
        chat('"messages":[{"role":"user","content":['), '{"type":"text","text":"a"}', "]}]}")),
    "one long message": (CHAT, lambda: text(chat('"messages":[{"role":"user","content":"'), "hello ", '"}]}')),
    "template variables": (CHAT, lambda: keys(chat(f'"messages":[{MESSAGE}],"chat_template_kwargs":{{'), "}}")),
    "tools": (CHAT, lambda: filled(chat(f'"messages":[{MESSAGE}],"tools":['), "{}", "]}")),
    "input": (RESPONSES, lambda: filled("{" + MODEL + ',"input":[', MESSAGE, "]}")),
    "long input": (RESPONSES, lambda: text("{" + MODEL + ',"input":"', "hello ", '"}')),
    "text to tokenize": ("/tokenize", lambda: text('{"prompt":"', "hello ", '"}')),
    "messages to tokenize": ("/tokenize", lambda: filled('{"messages":[', MESSAGE, "]}")),
    "tokens": ("/detokenize", lambda: filled('{"tokens":[', "5", "]}")),
    "tokens that are text": ("/detokenize", lambda: filled('{"tokens":[', '"x"', "]}")),
    "no JSON": ("/detokenize", lambda: '"' * BODY_BYTES),
}  # fmt: skip


@cache
def largest_list() -> str:
    return filled("[", "5", "]")


def reading_seconds() -> float:
    """Processor time of `json` for the longest list, as busy as this machine is now."""
    begin = time.process_time()
    json.loads(largest_list())
    return time.process_time() - begin


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest one of something, and how long it might have been; both in seconds."""

    seconds: float
    allowed: float

    @classmethod
    def just_seen(cls, seconds: float) -> Stall:
        """Right after it, since a processor that is shared is slow for a while, and no longer."""
        return cls(seconds, STALL_SECONDS if seconds < STALL_SECONDS else max(STALL_SECONDS, 2 * reading_seconds()))

    @property
    def passes(self) -> bool:
        return self.seconds < self.allowed


class Heart:
    """Beats in the running loop and keeps the longest stall."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Heart:
        self._task = asyncio.ensure_future(self._beat())
        await asyncio.sleep(4 * PAUSE)
        self.longest = 0.0
        return self

    async def __aexit__(self, *reason: object) -> None:
        await asyncio.sleep(4 * PAUSE)
        assert self._task is not None
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(PAUSE)
            self.longest = max(self.longest, min(time.perf_counter() - wall, time.process_time() - cpu))


def machine(max_seq_len: int) -> Bench:
    return bench(tokenizer=byte_tokenizer(), vocab=256, max_seq_len=max_seq_len)


def measured(server: Service, path: str, data: bytes) -> tuple[httpx.Response, Stall]:
    """The answer, and the longest stall of the loop until it came."""

    async def talk() -> tuple[httpx.Response, Stall]:
        async with client_of(server) as client:
            await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})  # all is loaded
            async with Heart() as heart:
                response = await client.post(path, content=data, headers={"Content-Type": "application/json"})
            return response, Stall.just_seen(heart.longest)

    gc.collect()
    gc.freeze()  # as `serve` does
    try:
        for _ in range(3):  # what the request does to the loop, it does each time
            response, stall = asyncio.run(talk())
            if stall.passes:
                break
    finally:
        gc.unfreeze()
    return response, stall


# Shapes whose bounds grow with max_seq_len are sent to a server of long sequences as well.
LONG_SHAPES = (
    "prompt of ids", "prompt of ids that do not exist", "prompt of ids, cut", "prompts of ids", "one long prompt",
    "one long word", "one long prompt, cut", "one long message", "long input", "text to tokenize", "tokens",
)  # fmt: skip


@pytest.mark.parametrize(("shape", "max_seq_len"), [(s, 4096) for s in SHAPES] + [(s, 1 << 18) for s in LONG_SHAPES])
def test_no_body_holds_the_event_loop(shape: str, max_seq_len: int) -> None:
    path, make = SHAPES[shape]
    data = make().encode()
    assert len(data) <= BODY_BYTES
    with serving(machine(max_seq_len)) as server:
        response, stall = measured(server, path, data)
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            error: dict[str, Any] = json.loads(response.text)["error"]
            assert len(error["message"]) < 700 and error["type"] == "invalid_request_error"
        assert stall.passes, f"{stall}, then {response.text[:300]}"
        assert server.gate.inside == 0


def test_a_body_in_chunks_of_one_byte_does_not_hold_the_event_loop() -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    answers: list[bytes] = []

    def send(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(head + b"1\r\na\r\n" * 200_000 + b"0\r\n\r\n")
            answers.append(connection.recv(1000))

    with serving(machine(4096)) as server:

        async def talk() -> Stall:
            runner = uvicorn.Server(uvicorn_config(server))
            running = asyncio.ensure_future(runner.serve())
            while not runner.started:
                await asyncio.sleep(PAUSE)
            async with Heart() as heart:
                await asyncio.to_thread(send, server.settings.port)
            runner.should_exit = True
            await running
            return Stall.just_seen(heart.longest)

        stall = asyncio.run(talk())
    assert answers[0].startswith(b"HTTP/1.1 400") and stall.passes, stall


def test_a_template_that_does_not_end_holds_neither_the_loop_nor_other_work() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    body = {"model": NAME, "messages": [json.loads(MESSAGE)]}
    with LLM.from_engine(machine(4096).engine) as llm:
        server = service(llm, ChatTemplate(endless, seconds=1.0))

        async def talk() -> Stall:
            async with client_of(server) as client, Heart() as heart:
                chats = [asyncio.ensure_future(client.post(CHAT, json=body)) for _ in range(2)]
                await asyncio.sleep(0.1)
                other = await client.post("/tokenize", json={"prompt": "ab" * 10_000})
                assert other.status_code == 200 and not any(chat.done() for chat in chats)
                for chat in chats:
                    assert "within 1 s" in (await chat).json()["error"]["message"]
            return Stall.just_seen(heart.longest)

        stall = asyncio.run(talk())
        assert stall.passes, stall


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_answer_holds_the_event_loop(path: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": NAME, "max_tokens": 200 if stream else 1000, "temperature": 0, "n": 16}
    body |= {"prompt": "a", "logprobs": 20} if path == COMPLETIONS else {"messages": [json.loads(MESSAGE)]}
    body |= {} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 20}
    machine = bench(tokenizer=byte_tokenizer(), vocab=256, max_seq_len=1024, slots=16, eos_ids=())
    with serving(machine) as server:
        response, stall = measured(server, path, json.dumps({**body, "stream": stream}).encode())
        assert response.status_code == 200 and len(response.content) > 1_000_000
        assert stall.passes, stall


def test_scoring_and_echoing_long_prompts_does_not_hold_the_event_loop() -> None:
    prompts = [[i % 256 for i in range(500)]] * 8
    body = {"model": NAME, "prompt": prompts, "echo": True, "logprobs": 20, "max_tokens": 0, "n": 4}
    with serving(machine(1024)) as server:
        response, stall = measured(server, COMPLETIONS, json.dumps(body).encode())
        assert response.status_code == 200 and len(response.json()["choices"]) == 32
        assert stall.passes, stall
