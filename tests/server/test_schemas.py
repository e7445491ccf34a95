"""Schemas that are slow, huge or fatal to compile hold up nobody else: not their neighbours, not the server's end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import NAME, QWEN, client_of, qwen_template, service, wait_for
from trtllm_replayssm import LLM
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.server import grammar_worker
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.server.trials import Trials

pytest.importorskip("xgrammar", reason="needs xgrammar: pip install xgrammar")

SLOW = {"type": "string", "pattern": "^([a-z]{1,60}){1,60}$"}  # minutes, on any machine
QUICK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
SECONDS = 2.0
LONG = 60.0  # nobody may wait for a schema that takes it


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(QWEN, max_seq_len=128, max_batch_size=4) as llm:
        yield llm


@pytest.fixture(params=[SECONDS])
def server(llm: LLM, request: pytest.FixtureRequest) -> Iterator[Service]:
    server = service(llm, qwen_template(), schema_seconds=request.param)
    server.guided.prepare()
    yield server
    server.guided.close()


def body(schema: Any, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"model": NAME, "prompt": "a", "max_tokens": 30, "seed": 1, "response_format": wanted, **fields}


def talk(server: Service, conversation: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with client_of(server) as client:
            await conversation(client)

    asyncio.run(run())


async def timed(client: httpx.AsyncClient, schema: Any, **fields: Any) -> tuple[httpx.Response, float]:
    began = time.monotonic()
    response = await client.post("/v1/completions", json=body(schema, **fields))
    return response, time.monotonic() - began


def compiling(server: Service) -> int:
    """Schemas on trial."""
    return len(server.guided.prepare()[1]._trials)


def test_a_slow_schema_is_refused_in_time_and_a_second_time_at_once(server: Service) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        response, seconds = await timed(client, SLOW)
        assert response.status_code == 400 and seconds < 2 * SECONDS + 20  # 20: the process for trials may be starting
        error = response.json()["error"]
        assert error["param"] == "response_format" and f"compiles within {SECONDS:g} s" in error["message"]
        tried = server.guided.prepare()[1]._serial
        again, _ = await timed(client, SLOW, stream=True)
        assert again.status_code == 400 and again.json() == response.json()
        assert server.guided.prepare()[1]._serial == tried
        assert (await timed(client, QUICK))[0].status_code == 200
        assert server.gate.inside == 0 and compiling(server) == 0

    talk(server, conversation)


@pytest.mark.parametrize("server", [LONG], indirect=True)
def test_a_slow_schema_holds_up_neither_other_schemas_nor_plain_text(server: Service) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await timed(client, QUICK))[0].status_code == 200  # everything is loaded
        slow = asyncio.ensure_future(timed(client, SLOW))
        while not compiling(server):
            await asyncio.sleep(0.01)
        for fields in ({"response_format": None}, {"response_format": {"type": "json_object"}}, {}):
            response, seconds = await timed(client, {**QUICK, "title": str(fields)}, **fields)
            assert response.status_code == 200 and seconds < LONG / 2
            assert not slow.done()
        slow.cancel()

    talk(server, conversation)


@pytest.mark.parametrize("server", [LONG], indirect=True)
def test_a_client_that_leaves_takes_its_schema_along(server: Service) -> None:
    """Both the ones on trial and the ones that wait for it; the gate is empty then."""

    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await timed(client, QUICK))[0].status_code == 200
        schemas = [{**SLOW, "title": str(i)} for i in range(6)]
        leaving = [asyncio.ensure_future(timed(client, schema)) for schema in schemas]
        while compiling(server) < 2:
            await asyncio.sleep(0.01)
        assert server.gate.inside == 6
        began = time.monotonic()
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        assert server.gate.inside == 0
        response, _ = await timed(client, {**QUICK, "title": "next"})
        assert response.status_code == 200 and time.monotonic() - began < LONG / 2
        assert compiling(server) == 0

    talk(server, conversation)


def test_the_gate_counts_who_compiles(llm: LLM) -> None:
    server = service(llm, schema_seconds=SECONDS, max_queue_size=0)

    async def conversation(client: httpx.AsyncClient) -> None:
        slow = asyncio.ensure_future(timed(client, SLOW, n=4))
        while not server.gate.inside:
            await asyncio.sleep(0.01)
        assert (await timed(client, QUICK))[0].status_code == 429
        assert (await slow)[0].status_code == 400

    talk(server, conversation)
    server.guided.close()


@pytest.mark.parametrize("second", [False, True], ids=["drained", "halted"])
def test_a_server_that_stops_ends_schemas_with_503(llm: LLM, second: bool) -> None:
    server = service(llm, schema_seconds=LONG, drain_seconds=30 if second else 1)

    async def conversation(client: httpx.AsyncClient) -> None:
        assert (await timed(client, QUICK))[0].status_code == 200
        waiting = [asyncio.ensure_future(timed(client, {**SLOW, "title": str(i)}, stream=i % 2 == 1)) for i in range(4)]
        while compiling(server) < 2:
            await asyncio.sleep(0.01)
        began = time.monotonic()
        drain = asyncio.ensure_future(server.drain())
        await asyncio.sleep(0.1)
        refused, _ = await timed(client, QUICK)
        assert refused.status_code == 503 and int(refused.headers["Retry-After"]) <= (30 if second else 1)
        if second:
            server.halt()
        await drain
        assert time.monotonic() - began < LONG / 4
        for response, _ in await asyncio.gather(*waiting):
            assert response.status_code == 503 and response.json()["error"]["type"] == "server_error"
            assert response.headers["Retry-After"] == "1"
        assert server.gate.inside == 0

    talk(server, conversation)
    names = [thread.name for thread in threading.enumerate() if not thread.daemon]
    assert names == ["MainThread"], "nothing that the process's end would wait for"


def test_a_schema_admitted_before_the_stop_may_still_finish(server: Service) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        admitted = asyncio.ensure_future(timed(client, QUICK, max_tokens=60))
        while not server.gate.inside:
            await asyncio.sleep(0.001)
        await server.drain()
        assert (await admitted)[0].status_code == 200

    talk(server, conversation)


def test_the_process_for_trials_may_die_and_is_started_again(server: Service) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        _, trials = server.guided.prepare()
        assert (await timed(client, QUICK))[0].status_code == 200
        slow = asyncio.ensure_future(timed(client, SLOW))
        while not compiling(server):
            await asyncio.sleep(0.01)
        process = trials._process
        assert process is not None
        process.kill()
        assert (await slow)[0].status_code == 503
        assert (await timed(client, {**QUICK, "title": "again"}))[0].status_code == 200
        assert trials._process is not process

    talk(server, conversation)


def test_its_end_is_the_end_of_the_process_and_its_children(server: Service) -> None:
    _, trials = server.guided.prepare()
    trial = trials.submit('{"type": "string", "pattern": "^([a-z]{1,60}){1,60}$"}')
    process = trials._process
    assert process is not None
    server.guided.close()
    wait_for(lambda: process.poll() is not None, "the process to end")
    wait_for(trial.done.is_set, "the trial to end")
    assert trial.outcome is None


def test_what_is_kept_is_bounded(server: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        for i in range(6):
            assert (await timed(client, {**QUICK, "title": str(i)}, max_tokens=1))[0].status_code == 200
        assert 1 <= len(server.guided._compiled) < 6
        assert server.guided.cached_bytes == sum(size for _, size in server.guided._compiled.values()) <= 12_000
        await asyncio.gather(*(timed(client, {**QUICK, "title": "same"}, max_tokens=1) for _ in range(4)))
        assert server.guided.cached_bytes == sum(size for _, size in server.guided._compiled.values())

    monkeypatch.setattr("trtllm_replayssm.runtime.server.guided.CACHE_BYTES", 12_000)
    talk(server, conversation)


FAKE = """
import os, time

class VocabType:
    RAW = 0

def TokenizerInfo(pieces, kind, **options):
    return pieces, options["vocab_size"], options["stop_token_ids"]

class GrammarCompiler:
    memory_size_bytes = 1

    def __init__(self, tokens, **options):
        assert tokens == ([b"a", b"\\xff\\n", b""], 5, [2])

    def compile_json_schema(self, schema, **options):
        if schema == "memory":
            return bytearray(2 << 30)
        if schema == "crash":
            os.kill(os.getpid(), 11)
        if schema == "forever":
            time.sleep(60)
        if schema == "wrong":
            raise RuntimeError("no such reference")
        self.memory_size_bytes = 1 << 40 if schema == "large" else 1
        return self
"""


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    """With a compiler that does what its schema says."""
    (tmp_path / "xgrammar.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path)
    trials = Trials(grammar_worker.describe_tokens([b"a", b"\xff\n", b""], 5, (2,)), 0.4)
    yield trials
    trials.close()


@pytest.mark.parametrize(
    ("schema", "words"),
    [("memory", "memory"), ("large", "memory"), ("forever", r"within 0\.4 s"), ("crash", "cannot take"),
     ("wrong", "no such reference")],
)  # fmt: skip
def test_a_trial_ends_whatever_the_compiler_does_and_touches_no_other(trials: Trials, schema: str, words: str) -> None:
    before, bad, after = trials.submit("fine"), trials.submit(schema), trials.submit("fine")
    with pytest.raises(RequestError, match=words) as caught:
        trials.wait(bad)
    assert caught.value.argument == "response_format"
    trials.wait(before)
    trials.wait(after)
    trials.wait(trials.submit("fine"))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/nope"}, "Cannot find field 'nope' in #/nope"),
        ({"type": "objct"}, 'Unsupported type "objct"'),
        ({"type": "string", "pattern": "("}, "Regex parsing error at position 2: The parenthesis is not closed."),
        ({"$ref": "file:///etc/passwd"}, "'file:///etc/passwd'"),
        ({"type": "array", "items": {"anyOf": [{"$ref": "http://x/y#/z"}]}}, "'http://x/y#/z'"),
    ],
)
def test_a_refusal_names_the_fault_and_nothing_of_the_compiler(server: Service, schema: Any, reason: str) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json=body(schema))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].endswith(f"got {reason}"), answer.text

    talk(server, conversation)


def test_what_looks_like_a_reference_in_data_is_data(server: Service) -> None:
    async def conversation(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json=body({"const": {"$ref": "elsewhere"}}))
        assert answer.json()["choices"][0]["text"].startswith('{"$ref"'), answer.text

    talk(server, conversation)
