"""The routing of examples/ray_serve without Ray: one conversation, one replica; an overloaded one is passed over."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections import Counter
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import pytest

from tests.paths import EXAMPLES


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ray_serve_{name}", EXAMPLES / "ray_serve" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROUTING = load("routing")


def test_a_body_is_read_no_further_than_its_limit() -> None:
    read = []

    async def parts() -> AsyncIterator[bytes]:
        for number in range(10):
            read.append(number)
            yield b"12345"

    assert asyncio.run(ROUTING.limited_body(parts(), 50)) == b"12345" * 10
    read.clear()
    assert asyncio.run(ROUTING.limited_body(parts(), 12)) is None
    assert read == [0, 1, 2]


def test_a_replica_asks_for_the_key_that_it_was_given() -> None:
    replica = load("replica").Replica(str(EXAMPLES / "qwen3_5-tiny-nvfp4"), {"max_seq_len": 64}, "secret")

    async def statuses() -> list[int]:
        found = []
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer secret"}):
            async for part in replica.call("GET", "/v1/models", b"", headers, b""):
                if isinstance(part, tuple):
                    found.append(part[0])
        return found

    try:
        assert asyncio.run(statuses()) == [401, 401, 200]
    finally:
        replica.llm.shutdown()


def key(fields: Any, **headers: str) -> str:
    return ROUTING.affinity_key(headers, json.dumps(fields).encode())  # type: ignore[no-any-return]


def turn(*texts: str, role: str = "user") -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for text in texts], "model": "m"}


def test_later_turns_of_a_conversation_keep_its_key() -> None:
    first = "Tell me about hybrid models. " * 20
    assert key(turn(first)) == key(turn(first, "They mix.", "Go on.")) != key(turn("Else. " * 60))
    assert key({"prompt": first}) == key({"prompt": first + "more", "stream": True, "seed": 3})
    assert key(turn("Hi")) == key(turn("Hi", "Hello!", "And?"))  # a short one too
    system = {"role": "system", "content": "Be brief."}
    assert key({"messages": [system, *turn("Hi")["messages"]]}) != key(turn("Hi"))  # type: ignore[misc]
    ids = list(range(300))
    assert key({"prompt": ids}) == key({"prompt": [*ids[:280], 7]}) != key({"prompt": ids[1:]})
    assert key({"input": first}) == key({"input": first + "more"})


def test_short_conversations_that_part_early_have_keys_of_their_own() -> None:
    assert len({key(turn(text)) for text in ("a", "b", "aa", "a b")}) == 4
    assert key({"prompt": [1, 2]}) != key({"prompt": [12]})
    assert key(turn("a", role="system")) != key(turn("a"))


def test_a_named_session_counts_before_the_prompt() -> None:
    headers = {"x-session-id": "s1"}
    assert ROUTING.affinity_key(headers, b"{}") == key(turn("anything"), **headers)
    assert key(turn("a"), **headers) != key(turn("a"), **{"x-session-id": "s2"})


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'{"prompt": null}', b'{"messages": {}}', b"\xff"])
def test_a_body_that_the_server_will_refuse_has_a_key_too(body: bytes) -> None:
    assert isinstance(ROUTING.affinity_key({}, body), str)


def test_keys_are_spread_evenly_and_few_move_when_a_replica_comes() -> None:
    keys = [f"prompt {i}" for i in range(4000)]
    before = [ROUTING.rank(k, 4)[0] for k in keys]
    assert all(900 < count < 1100 for count in Counter(before).values())
    after = [ROUTING.rank(k, 5)[0] for k in keys]
    moved = [(b, a) for b, a in zip(before, after, strict=True) if a != b]
    assert all(a == 4 for _, a in moved) and 700 < len(moved) < 900
    assert all(sorted(ROUTING.rank(k, 4)) == [0, 1, 2, 3] for k in keys[:50])


def test_the_own_replica_answers_until_it_is_full_and_has_more_than_its_share() -> None:
    order = [2, 0, 1]
    assert ROUTING.choose(order, [0, 0, 7], capacity=8) == 2  # a slot is free
    assert ROUTING.choose(order, [7, 7, 8], capacity=8) == 2  # full, but so are the others
    assert ROUTING.choose(order, [0, 0, 12], capacity=8) == 0  # the next of the key's order
    assert ROUTING.choose(order, [12, 1, 12], capacity=8) == 1
    assert ROUTING.choose([0], [99], capacity=8) == 0


def test_one_popular_prompt_ends_up_on_all_replicas_within_the_slack() -> None:
    loads = [0, 0, 0]
    order = ROUTING.rank("prompt popular", 3)
    for _ in range(90):
        loads[ROUTING.choose(order, loads, capacity=4)] += 1
    assert sum(loads) == 90 and max(loads) <= 1.25 * 90 / 3 + 1 and min(loads) >= 10
