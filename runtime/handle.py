"""A running request in its caller's hands: wait, await, iterate over it, or abort it. Safe in any thread.

The engine's thread publishes; readers see the newest output. A slow reader misses intermediate outputs, never tokens:
each output is whole, and its diffs count from the one that this reader saw before.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any

from trtllm_replayssm.runtime.outputs import CompletionOutput, RequestOutput

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Wakes:
    """Readers in event loops that have something to read: each loop is called once, however many of them it runs."""

    def __init__(self) -> None:
        self._futures: defaultdict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)

    def add(self, waiters: Iterable[_Waiter]) -> None:
        """Readers to wake."""
        for loop, future in waiters:
            self._futures[loop].append(future)

    def send(self) -> None:
        """Wake them."""
        for loop, futures in self._futures.items():
            try:
                loop.call_soon_threadsafe(_wake, futures)
            except RuntimeError:  # the readers' event loop is gone, and they with it
                continue


class RequestHandle:
    """What `LLM.generate_async` returns."""

    def __init__(self, output: RequestOutput, *, streaming: bool, abort: Callable[[int], None]) -> None:
        """output: the request as it is queued; streaming: publish at every step rather than at the end."""
        self.streaming = streaming
        self._output = output
        self._abort = abort
        self._version = 0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._blocked = 0  # threads that wait for it
        self._waiters: list[_Waiter] = []

    @property
    def request_id(self) -> int:
        """The engine's number of this request."""
        return self._output.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self._output.prompt_token_ids

    @property
    def output(self) -> RequestOutput:
        """The newest output."""
        return self._output

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The newest output of each choice."""
        return self._output.outputs

    @property
    def finished(self) -> bool:
        """Whether every choice has ended, or the engine failed."""
        return self._output.finished or self._error is not None

    def abort(self) -> None:
        """Ask the engine to end the request; its output then says "cancelled". Nothing happens once it has ended."""
        if not self.finished:
            self._abort(self.request_id)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end -> the last output. timeout in seconds: TimeoutError. Raises what stopped the engine."""
        with self._lock:
            if not self._wait_for(lambda: self.finished, timeout):
                raise TimeoutError(f"request {self.request_id}: not finished after {timeout} s")
        return self._last()

    async def aresult(self) -> RequestOutput:
        """As `result`, without blocking the event loop."""
        while True:
            version = self._version  # before the look: what comes in between then ends the wait
            if self.finished:
                return self._last()
            await self._wait(version)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        reader = _Reader(self)
        while True:
            with self._lock:
                self._wait_for(reader.has_news)
            yield reader.take()
            if reader.done:
                return

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        reader = _Reader(self)
        while True:
            while not reader.has_news():
                await self._wait(reader.version)
            yield reader.take()
            if reader.done:
                return

    def publish(self, output: RequestOutput, wakes: Wakes) -> None:
        """A newer output; called by the engine's thread. wakes: takes the readers in event loops that wait for it."""
        self._advance(output, None, wakes)

    def fail(self, error: BaseException) -> None:
        """The engine stopped; called by its thread."""
        wakes = Wakes()
        self._advance(self._output, error, wakes)
        wakes.send()

    def _advance(self, output: RequestOutput, error: BaseException | None, wakes: Wakes) -> None:
        with self._lock:
            self._output, self._error = output, error
            self._version += 1
            if self._blocked:
                self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        wakes.add(waiters)

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until the condition holds; the caller has the lock."""
        self._blocked += 1
        try:
            return self._changed.wait_for(condition, timeout)
        finally:
            self._blocked -= 1

    def _last(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
        return self._output

    async def _wait(self, version: int) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._version != version:
                return
            self._waiters.append((loop, future))
        try:
            await future
        except BaseException:  # it waits no more; one that asks again and again must not be kept each time
            with self._lock:
                self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]
            raise


class _Reader:
    """One iteration over a handle: remembers what it has seen."""

    def __init__(self, handle: RequestHandle) -> None:
        self._handle = handle
        self._previous: RequestOutput | None = None
        self.version = 0
        self.done = False

    def has_news(self) -> bool:
        return self._handle._version != self.version or self._handle.finished

    def take(self) -> RequestOutput:
        handle = self._handle
        with handle._lock:
            self.version = handle._version
            output = handle._last()
        output = output.after(self._previous)
        self._previous = output
        self.done = output.finished
        return output


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
