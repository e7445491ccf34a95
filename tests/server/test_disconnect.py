"""I14: a client that leaves frees its slots within a few steps, wherever its request stands."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import Bench, bench
from tests.server.harness import NAME, client_of, live, wait_for
from tests.server.scripted import serving, slow
from trtllm_replayssm.runtime.server.service import Service

STEPS = 12  # engine steps that may pass until the slot is free: the server must first hear of it


def body(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 5000, "detokenize": False, **fields}


def machine(**options: Any) -> Bench:
    return bench(model=slow(hash_model(24), 0.01), eos_ids=(), max_seq_len=6000, **options)


def send(server: Service, fields: dict[str, Any]) -> socket.socket:
    """A raw request on a socket of its own, left open."""
    data = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.settings.port))
    connection.sendall(head.encode() + data)
    return connection


def leave(connection: socket.socket, *, reset: bool) -> None:
    """Close, or reset as a killed process does."""
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()


def steps(server: Service) -> int:
    return int(str(server.llm.stats()["steps"]))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_i14_leaving_while_tokens_come_frees_every_slot_within_a_few_steps(
    stream: bool, reset: bool, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(machine()) as server, live(server):
        connection = send(server, body(stream=stream, n=n, temperature=1.0))
        wait_for(lambda: server.llm.load().running == n and steps(server) > 3, "decoding")
        if stream:
            assert b"data: " in connection.recv(4096) + connection.recv(4096)
        before = steps(server)
        leave(connection, reset=reset)
        wait_for(lambda: server.llm.load().free_slots == 4, "free slots")
        assert steps(server) - before <= STEPS
        wait_for(lambda: server.gate.inside == 0, "the gate")
        assert server.meters.finished == {"cancelled": n}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("stream", [True, False])
def test_i14_leaving_during_the_prompt_stops_its_chunks(stream: bool) -> None:
    with serving(machine(chunk=2)) as server, live(server):
        # one more slot is busy, so that steps are slow and the prompt takes many of them
        other = send(server, body(stream=True))
        wait_for(lambda: steps(server) > 2, "another request")
        connection = send(server, body(prompt=[1] * 4000, stream=stream))
        wait_for(lambda: server.llm.load().running == 2, "the prompt to start")
        before = steps(server)
        leave(connection, reset=False)
        wait_for(lambda: server.llm.load().free_slots == 3, "a free slot")
        assert steps(server) - before <= STEPS
        leave(other, reset=False)
        wait_for(lambda: server.llm.load().free_slots == 4, "all slots")


def test_i14_leaving_the_queue_lets_the_next_one_in() -> None:
    with serving(machine(slots=1)) as server, live(server):
        first = send(server, body(stream=True))
        wait_for(lambda: server.llm.load().running == 1, "the first")
        second = send(server, body(stream=True))
        wait_for(lambda: server.llm.load().waiting == 1, "the second to queue")
        leave(second, reset=False)
        wait_for(lambda: server.llm.load().waiting == 0, "an empty queue")
        assert server.llm.load().running == 1
        leave(first, reset=False)
        wait_for(lambda: server.llm.load().free_slots == 1, "the slot")


def test_a_client_that_leaves_before_its_body_is_complete_starts_nothing() -> None:
    with serving(machine()) as server, live(server) as url:
        connection = socket.create_connection(("127.0.0.1", server.settings.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        connection.close()
        assert httpx.get(f"{url}/health").status_code == 200
        assert steps(server) == 0 and server.gate.inside == 0


def test_a_cancelled_call_in_this_process_frees_its_slot() -> None:
    """The same without sockets: the task that runs the application is cancelled."""
    with serving(machine()) as server:

        async def talk() -> None:
            async with client_of(server) as client:
                task = asyncio.ensure_future(client.post("/v1/completions", json=body()))
                while not server.llm.load().running:
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait({task})

        asyncio.run(talk())
        wait_for(lambda: server.llm.load().free_slots == 4, "free slots")
        assert server.gate.inside == 0
