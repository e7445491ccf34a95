"""SIGTERM once and twice, in the middle of everything: whoever is connected hears of it, and the process ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import signal
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from tests.server.harness import ENDLESS_POSITIONS, NAME, QWEN, Process, endless_checkpoint, process, wait_for
from trtllm_replayssm.runtime.server.guard import Guard
from trtllm_replayssm.runtime.server.limits import Limits
from trtllm_replayssm.runtime.server.stream import EVENTS

ROOM = ("--max_seq_len", str(ENDLESS_POSITIONS))
ENDLESS = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 60_000, "detokenize": False, "ignore_eos": True}
SLOW = {"type": "string", "pattern": "^([a-z]{1,60}){1,60}$"}
QUICK = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
EXIT_SECONDS = 5.0  # of a server that ends in one on a machine with nothing else to do


def outcome(url: str, body: dict[str, Any], path: str = "/v1/completions") -> str:
    """How a request ended, as its client sees it; "cut" and "plain" are what must not be."""
    try:
        with httpx.stream("POST", f"{url}{path}", json=body, timeout=120) as response:
            text = response.read().decode()
    except httpx.ConnectError:
        return "refused"
    except httpx.HTTPError:
        return "cut"
    try:
        if response.status_code != 200:
            return f"{response.status_code} {json.loads(text)['error']['type']}"
        if not body.get("stream"):
            json.loads(text)
            return "whole"
        *events, end = (line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: "))
        last = json.loads(events[-1])
        return "cut" if end != "[DONE]" else "error event" if last.get("error") else "whole"
    except (ValueError, KeyError, IndexError):
        return "plain"


def status(server: Process) -> Any:
    return httpx.get(f"{server.url}/status.json").json()


def half_a_request(server: Process) -> socket.socket:
    """A connection whose body never comes to its end."""
    port = int(server.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    return connection


def test_a_second_signal_ends_every_request_with_an_error_and_the_process_soon(tmp_path: Path) -> None:
    """Running, queued, streamed or not, and one whose body is still on its way."""
    flags = ("--max_batch_size", "4", *ROOM)
    model = endless_checkpoint(tmp_path)
    with process(model, *flags) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        bodies = [{**ENDLESS, "stream": i % 2 == 0, "n": 1 + i % 3 // 2} for i in range(12)]
        ends = [pool.submit(outcome, server.url, body) for body in bodies]
        # three where two choices that come fourth wait for two slots
        wait_for(lambda: status(server)["running"] >= 3 and status(server)["waiting"] >= 6, "a queue")
        half = half_a_request(server)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: status(server)["stopping"], "draining")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert time.monotonic() - began < EXIT_SECONDS
        found = [end.result(30) for end in ends]
        answer = half.recv(1 << 16)
        logs = server.logs()
    assert found == ["error event" if body["stream"] else "503 server_error" for body in bodies]
    assert answer.startswith(b"HTTP/1.1 503") and b'"server_stopping"' in answer
    assert b"retry-after: 1" in answer.lower()
    assert "Traceback" not in logs


def test_the_retry_time_of_a_draining_server_counts_down(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("replayssm: {limits: {drain_seconds: 20}}\n")
    flags = ("--config", str(tmp_path / "config.yaml"), "--max_batch_size", "1", *ROOM)
    with process(endless_checkpoint(tmp_path), *flags) as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        running = [pool.submit(outcome, server.url, {**ENDLESS, "stream": True}) for _ in range(16)]
        wait_for(lambda: status(server)["waiting"] == 15, "a queue")
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: status(server)["stopping"], "draining")
        times = []
        for _ in range(3):
            refused = httpx.post(f"{server.url}/v1/completions", json=ENDLESS)
            assert refused.status_code == 503
            times.append(int(refused.headers["Retry-After"]))
            time.sleep(1.1)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        assert "error event" in [end.result(30) for end in running]
    assert 20 >= times[0] > times[1] > times[2] >= 1


def test_sigterm_in_a_load_with_schemas_finishes_or_refuses_every_request(tmp_path: Path) -> None:
    """Quick schemas, and slow ones on trial and waiting, beside plain text; several choices; drafts."""
    pytest.importorskip("xgrammar", reason="needs xgrammar: pip install xgrammar")
    limits = "{drain_seconds: 6, schema_seconds: 60}"
    (tmp_path / "config.yaml").write_text(f"replayssm: {{drafter: ngram, draft_len: 3, limits: {limits}}}\n")
    flags = ("--config", str(tmp_path / "config.yaml"), "--max_batch_size", "4", "--max_seq_len", "512")
    with process(QWEN, *flags) as server, concurrent.futures.ThreadPoolExecutor(32) as pool:
        body = {"model": NAME, "prompt": "One:", "max_tokens": 40, "seed": 3}
        formats = [None, QUICK, SLOW, QUICK]
        ends = []
        for i in range(24):
            schema = formats[i % 4]
            named = {"name": "x", "schema": {**(schema or {}), "title": str(i)}}
            extra = {} if schema is None else {"response_format": {"type": "json_schema", "json_schema": named}}
            ends.append(pool.submit(outcome, server.url, {**body, **extra, "stream": i % 3 == 0, "n": 1 + i % 2}))
        wait_for(lambda: status(server)["running"] > 0, "a request", 60)
        helpers: set[int] = set()

        def on_trial() -> bool:  # a quick schema's process may be gone at the next look
            helpers.clear()
            helpers.update(offspring(server.process.pid))
            return len(helpers) > 1

        wait_for(on_trial, "schemas on trial")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        late = [pool.submit(outcome, server.url, body) for _ in range(4)]
        assert server.process.wait(60) == 0
        assert time.monotonic() - began < 6 + EXIT_SECONDS
        found, refused = Counter(end.result(30) for end in ends), {end.result(30) for end in late}
        logs = server.logs()
    assert set(found) <= {"whole", "503 server_error", "error event"}
    assert found["503 server_error"] + found["error event"] >= 6  # the slow ones
    assert refused <= {"503 server_error", "refused"}
    assert "Traceback" not in logs and "stopping" in logs
    assert len(helpers) > 1
    wait_for(lambda: not any(Path(f"/proc/{helper}").exists() for helper in helpers), "the schema compiler to end")


@pytest.mark.parametrize("stopping", [True, False])
def test_a_stream_that_is_cancelled_ends_with_an_error_event_when_the_server_stops(stopping: bool) -> None:
    """The outermost layer, whatever the endpoint was doing."""
    sent: list[Any] = []

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", EVENTS)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(60)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def talk() -> bool:
        scope = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "query_string": b"", "headers": []}
        task = asyncio.ensure_future(Guard(stuck, Limits(), None, lambda: stopping)(scope, receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(talk()) is not stopping
    if stopping:
        event, end = (part.removeprefix("data: ") for part in sent[-1]["body"].decode().split("\n\n") if part)
        assert json.loads(event)["error"]["code"] == "server_stopping" and end == "[DONE]"
        assert sent[-1]["more_body"] is False
    else:
        assert len(sent) == 2


def offspring(pid: int) -> set[int]:
    """Process ids of all descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
