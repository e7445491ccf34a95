"""Requests that have ended: what they hold goes without the garbage collector, and their readers know of the end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.runtime.harness import Bench, bench
from tests.server.harness import wait_for
from trtllm_replayssm.runtime import loop as loop_module
from trtllm_replayssm.runtime.handle import RequestHandle, Wakes
from trtllm_replayssm.runtime.loop import EngineLoop
from trtllm_replayssm.runtime.outputs import RequestOutput, request_output
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.request import Request

KINDS: dict[str, dict[str, Any]] = {"host": {}, "device": {"kind": "mtp", "ahead": True}}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def machine(request: pytest.FixtureRequest) -> Bench:
    return bench(eos_ids=(), max_seq_len=4096, **request.param)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.usefixtures("no_collector")
def test_what_an_ended_request_holds_goes_at_once(machine: Bench, streaming: bool, cancelled: bool) -> None:
    loop = EngineLoop(machine.engine)
    try:
        params = SamplingParams(max_tokens=4000 if cancelled else 9, temperature=0.0, n=3)
        request = loop.prepare([5, 6], params)
        held = [weakref.ref(request), *(weakref.ref(choice) for choice in request.choices)]
        handle = loop.start(request, streaming=streaming)
        del request
        if cancelled:
            handle.abort()
        output = handle.result(60)
        assert [choice.finish_reason for choice in output.outputs] == ["cancelled" if cancelled else "length"] * 3
        # the next one pushes out what the last step may still have had in its hands
        loop.start(loop.prepare([7], SamplingParams(max_tokens=9)), streaming=False).result(60)
        wait_for(lambda: [ref() for ref in held] == [None] * 4, "the request to go")
    finally:
        loop.close()


@pytest.mark.parametrize("told", [0, 1])
def test_readers_wake_when_publishing_stops_in_the_middle_of_a_step(told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests end in one step, and the output of one cannot be made: its reader and the other's both return."""
    machine = bench(eos_ids=(), slots=2)

    def failing(request: Request) -> RequestOutput:
        if request.finished and request.request_id >= told:
            raise MemoryError("no room for an output")
        return request_output(request)

    async def read(loop: EngineLoop) -> list[Any]:
        requests = [loop.prepare([5], SamplingParams(max_tokens=9)) for _ in range(2)]
        handles = [loop.start(request, streaming=False) for request in requests]
        work = [asyncio.ensure_future(handle.aresult()) for handle in handles]
        return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), 20)

    monkeypatch.setattr(loop_module, "request_output", failing)
    loop = EngineLoop(machine.engine)
    try:
        found = asyncio.run(read(loop))
    finally:
        loop.close()
    assert [type(one) for one in found] == [RequestOutput] * told + [MemoryError] * (2 - told)


def test_an_end_that_comes_while_a_reader_looks_for_it_is_not_waited_for() -> None:
    machine = bench(eos_ids=())
    request = machine.engine.make_request([5], SamplingParams(max_tokens=3), priority=0.5)
    before = request_output(request)
    machine.engine.enqueue(request)
    machine.run()

    class Looked(RequestHandle):
        """One that ends right after somebody saw that it had not."""

        @property
        def finished(self) -> bool:
            found = super().finished
            if not found:
                self.publish(request_output(request), Wakes())
            return found

    async def read() -> RequestOutput:
        return await asyncio.wait_for(Looked(before, streaming=False, abort=lambda _: None).aresult(), 10)

    assert asyncio.run(read()).finished


def test_a_reader_that_gives_up_again_and_again_is_not_kept() -> None:
    machine = bench(eos_ids=())
    request = machine.engine.make_request([5], SamplingParams(max_tokens=3), priority=0.5)
    handle = RequestHandle(request_output(request), streaming=False, abort=lambda _: None)
    futures: list[weakref.ref[Any]] = []

    async def read() -> None:
        loop = asyncio.get_running_loop()
        create = loop.create_future
        loop.create_future = lambda: (made := create(), futures.append(weakref.ref(made)))[0]  # type: ignore[method-assign]
        for _ in range(20):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(handle.aresult(), 0.001)

    asyncio.run(read())
    gc.collect()
    assert len(futures) >= 20 and [made for made in futures if made() is not None] == []
