"""/health_generate: ready while tokens come, however long the queue is; unready when none comes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import httpx
import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import bench
from tests.server.harness import NAME, client_of, over_asgi, wait_for
from tests.server.scripted import serving, slow
from trtllm_replayssm.runtime.sampling.distribution import Logits
from trtllm_replayssm.runtime.server import admin

BODY = {"model": NAME, "prompt": [1], "max_tokens": 2500, "detokenize": False}


def test_a_full_queue_is_ready_and_asks_for_one_more_choice_only() -> None:
    machine = bench(model=slow(hash_model(24), 0.005), eos_ids=(), slots=1, max_seq_len=3000)
    with serving(machine, max_queue_size=2) as server:

        async def talk(client: httpx.AsyncClient) -> None:
            held = [asyncio.ensure_future(client.post("/v1/completions", json=BODY)) for _ in range(3)]
            while server.gate.inside < 3:
                await asyncio.sleep(0.005)
            assert (await client.post("/v1/completions", json=BODY)).status_code == 429
            most, begin = 0, time.monotonic()
            probes = [asyncio.ensure_future(client.get("/health_generate")) for _ in range(20)]
            while not all(probe.done() for probe in probes):
                most = max(most, server.llm.load().waiting)
                await asyncio.sleep(0.001)
            assert [probe.result().status_code for probe in probes] == [200] * 20
            assert most <= 3 and time.monotonic() - begin < 10
            assert server.gate.inside == 3
            for task in held:
                task.cancel()
            await asyncio.wait(held)

        over_asgi(server, talk)
        wait_for(lambda: server.llm.load().free_slots == 1 and server.llm.load().waiting == 0, "an idle engine")


@pytest.mark.parametrize("busy", [False, True])
def test_an_engine_that_hangs_is_unready_and_ready_again_afterwards(
    busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "PROBE_SECONDS", 0.3)
    stuck, model = threading.Event(), hash_model(24)

    def hanging(tokens: Sequence[int]) -> Logits:
        while stuck.is_set():
            time.sleep(0.01)
        return model(tokens)

    with serving(bench(model=hanging, eos_ids=(), slots=1)) as server:

        async def talk(client: httpx.AsyncClient) -> None:
            stuck.set()
            others = [asyncio.ensure_future(client.post("/v1/completions", json={**BODY, "max_tokens": 5}))] * busy
            await asyncio.sleep(0.1)
            refused = await client.get("/health_generate")
            assert refused.status_code == 503 and "no token within 0.3 seconds" in refused.json()["error"]["message"]
            assert (await client.get("/health")).status_code == 200
            stuck.clear()
            assert (await client.get("/health_generate")).status_code == 200
            assert [(await other).status_code for other in others] == [200] * busy

        over_asgi(server, talk)
        wait_for(lambda: server.llm.load().free_slots == 1 and server.llm.load().waiting == 0, "an idle engine")


def test_a_probe_whose_token_cannot_be_drawn_is_unready() -> None:
    def broken(tokens: Sequence[int]) -> Logits:
        return hash_model(24)(tokens) * float("nan")

    with serving(bench(model=broken, eos_ids=())) as server:
        answer = over_asgi(server, lambda client: client.get("/health_generate"))
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"


def test_a_probe_ends_with_the_drain() -> None:
    machine = bench(model=slow(hash_model(24), 0.5), eos_ids=(), slots=1)
    with serving(machine) as server:

        async def talk() -> int:
            async with client_of(server) as client:
                probe = asyncio.ensure_future(client.get("/health_generate"))
                await asyncio.sleep(0.05)
                server.gate.stopping = True
                return (await probe).status_code

        assert asyncio.run(talk()) == 503
