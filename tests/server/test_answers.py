"""Answers written in pieces are the JSON that one piece would be; work beside the loop is bounded and in turn."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from trtllm_replayssm.runtime.server.answers import whole_json
from trtllm_replayssm.runtime.server.errors import OverloadedError
from trtllm_replayssm.runtime.server.offload import Workers
from trtllm_replayssm.runtime.server.protocol.common import Usage
from trtllm_replayssm.runtime.server.protocol.completions import Completion, CompletionChoice
from trtllm_replayssm.runtime.server.stream import event


@pytest.mark.parametrize("count", [0, 1, 5])
def test_pieces_make_the_whole(count: int) -> None:
    text = 'a "choices":[] \\"choices\\":[] é\u2028'
    choices = [CompletionChoice(index=i, text=text, finish_reason=None) for i in range(count)]
    shell = Completion(id=text, created=1, model=text, choices=[], usage=Usage.of(1, 2, 0))
    whole = shell.model_copy(update={"choices": choices})
    assert whole_json(shell, iter(choices)) == whole.model_dump_json()


@pytest.mark.parametrize("text", ["a\u2028b", "\u2029", "\x85\x0b\x0c\x1c\x1d\x1e\r\n", "é\u2028 €"])
def test_an_event_is_one_line_however_a_client_splits_lines(text: str) -> None:
    part = CompletionChoice(index=0, text=text, finish_reason=None)
    (line,) = [line for line in event(part.model_dump_json()).splitlines() if line]
    assert json.loads(line.removeprefix("data: "))["text"] == text


def test_workers_run_few_at_a_time_in_turn_and_refuse_the_rest() -> None:
    running, most, order = 0, 0, list[int]()
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            order.append(number)
        time.sleep(0.02)
        with lock:
            running -= 1
        if number == 3:
            raise KeyError(number)
        return number

    async def talk() -> list[object]:
        workers = Workers("work", threads=2, max_waiting=4)
        tasks = [asyncio.ensure_future(workers.run(lambda i=i: work(i))) for i in range(7)]  # type: ignore[misc]
        await asyncio.sleep(0.005)
        tasks[4].cancel()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    results = asyncio.run(talk())
    assert [results[i] for i in (0, 1, 2, 5)] == [0, 1, 2, 5] and most == 2
    assert isinstance(results[3], KeyError) and isinstance(results[4], asyncio.CancelledError)
    assert isinstance(results[6], OverloadedError) and results[6].status == 429
    assert sorted(order[:2]) == [0, 1] and 4 not in order and 6 not in order


def test_a_thread_is_free_again_after_a_caller_that_left() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go.wait(10)

    async def talk() -> str:
        workers = Workers("work", threads=1, max_waiting=1)
        left = asyncio.ensure_future(workers.run(slow))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        left.cancel()
        next_one = asyncio.ensure_future(workers.run(lambda: "next"))
        await asyncio.sleep(0.05)
        assert left.cancelled() and not next_one.done()  # the work that has begun keeps its thread
        go.set()
        return await asyncio.wait_for(next_one, 10)

    assert asyncio.run(talk()) == "next"
