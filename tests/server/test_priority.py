"""The field `priority`: who asks for more is served first, and nobody's text changes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import bench
from tests.server.harness import NAME, over_asgi
from tests.server.scripted import byte_tokenizer, serving, slow

BODY = {"model": NAME, "temperature": 0, "detokenize": False}
LONG = {**BODY, "prompt": [1, 2], "max_tokens": 120}
SHORT = {**BODY, "prompt": [3], "max_tokens": 3}


def machine() -> Any:
    model = slow(hash_model(256), 0.004)
    return bench(model=model, vocab=256, tokenizer=byte_tokenizer(), eos_ids=(), slots=1, max_seq_len=200)


@pytest.mark.parametrize("chat", [False, True])
def test_a_higher_priority_overtakes_a_running_request_which_then_goes_on(chat: bool) -> None:
    short = {**SHORT, "priority": 0.9}
    path = "/v1/completions"
    if chat:
        path = "/v1/chat/completions"
        short = {**{k: v for k, v in short.items() if k != "prompt"}, "messages": [{"role": "user", "content": "x"}]}

    async def talk(client: httpx.AsyncClient) -> None:
        alone = (await client.post("/v1/completions", json=LONG)).json()["choices"][0]["token_ids"]
        running = asyncio.ensure_future(client.post("/v1/completions", json={**LONG, "priority": 0.1}))
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(client.post("/v1/completions", json={**SHORT, "priority": 0.1}))
        await asyncio.sleep(0.02)
        overtaking = await client.post(path, json=short)
        assert overtaking.status_code == 200, overtaking.text
        assert not running.done() and not waiting.done()
        assert (await running).json()["choices"][0]["token_ids"] == alone
        assert (await waiting).status_code == 200

    with serving(machine()) as server:
        over_asgi(server, talk)
        assert server.llm.stats()["preemptions"] == 1


def test_the_server_may_bound_it() -> None:
    with serving(machine(), max_priority=0.5) as server:

        async def talk(client: httpx.AsyncClient) -> None:
            for priority, status in ((0.5, 200), (0, 200), (0.51, 400), (1, 400)):
                answer = await client.post("/v1/completions", json={**SHORT, "priority": priority})
                assert answer.status_code == status
                assert status == 200 or answer.json()["error"]["param"] == "priority"

        over_asgi(server, talk)
