"""The requests of one HTTP call: admitted together, read together, and ended together when the call ends early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.llm import RequestHandle, RequestOutput
from trtllm_replayssm.runtime.server.errors import GenerationError, OverloadedError
from trtllm_replayssm.runtime.server.limits import Limits

STOPPED = "the server stopped first"


class Gate:
    """Counts choices between admission and end; lives in the event loop's thread."""

    def __init__(self, running: int, limits: Limits) -> None:
        """running: choices that hold a slot at most."""
        self.running = running
        self.limit = running + limits.max_queue_size
        self.max_queue_size = limits.max_queue_size
        self.inside = 0
        self.refused = 0
        self.stopping = False
        self.cut = False  # nobody who is inside may finish any more
        self._drain_seconds = limits.drain_seconds
        self._deadline: float | None = None

    def enter(self, choices: int, wait_seconds: float) -> None:
        """Admit, or raise OverloadedError. wait_seconds: what the queue lately took, for Retry-After.

        RequestError for one request that is larger than an empty server takes: no later try would succeed.
        """
        try:
            self.check_open()
        except OverloadedError:
            self.refused += 1
            raise
        if choices > self.limit:
            sum_of = f"max_batch_size {self.running} + max_queue_size {self.max_queue_size}"
            raise RequestError("request", "n", expected=f"at most {self.limit} choices ({sum_of})", got=choices)
        if self.inside + choices > self.limit:
            self.refused += 1
            raise OverloadedError(
                "queue", expected=f"at most {self.max_queue_size} waiting choices", got=f"{choices} more", status=429,
                retry_after=min(wait_seconds, 60.0),
            )  # fmt: skip
        self.inside += choices

    def check_open(self) -> None:
        """Raise OverloadedError (503) when the server admits nobody any more."""
        if self.stopping:
            raise OverloadedError(
                "request", expected="a server that goes on", got="one that stops", status=503,
                retry_after=self.seconds_left,
            )  # fmt: skip

    def close(self, seconds: float) -> None:
        """Admit nobody any more; who is inside has this long, or what was left before if that is less."""
        self.stopping = True
        until = time.monotonic() + seconds
        self._deadline = until if self._deadline is None else min(until, self._deadline)

    @property
    def seconds_left(self) -> float:
        """For who is inside when the server stops: after that another may have taken its place."""
        if self._deadline is None:
            return self._drain_seconds
        return max(0.0, self._deadline - time.monotonic())

    def leave(self, choices: int) -> None:
        """What `enter` admitted has ended."""
        self.inside -= choices


class Run:
    """Handles of one call. Use as a context manager: whatever still runs at its end is aborted."""

    def __init__(self, handles: Sequence[RequestHandle], on_close: Callable[[Run], None]) -> None:
        """on_close: called once, when the call is over."""
        self.handles = list(handles)
        self._on_close = on_close
        self._closed = False

    async def results(self) -> list[RequestOutput]:
        """Every request's last output. Raises GenerationError when one could not be finished."""
        return [_checked(await _awaited(handle)) for handle in self.handles]

    async def news(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(number of the prompt, newer output) as they come, until all have ended. Raises GenerationError."""
        if len(self.handles) == 1:
            with _engine_faults():
                async for output in self.handles[0]:
                    yield 0, _checked(output)
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(self.handles))
        pumps = [asyncio.ensure_future(_pump(i, handle, queue)) for i, handle in enumerate(self.handles)]
        try:
            left = len(pumps)
            while left:
                i, item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield i, _checked(item)
        finally:
            for pump in pumps:
                pump.cancel()
            for pump in pumps:
                with suppress(asyncio.CancelledError):
                    await pump

    def stop(self) -> None:
        """The server stops: whoever reads gets that as an error now, whatever the engine is doing."""
        for handle in self.handles:
            if not handle.finished:
                handle.abort()
                handle.fail(GenerationError(STOPPED, status=503))

    def close(self) -> None:
        """Abort what runs; may be called twice."""
        if self._closed:
            return
        self._closed = True
        for handle in self.handles:
            handle.abort()
        self._on_close(self)


@contextmanager
def _engine_faults() -> Iterator[None]:
    """What reading a handle raises, as GenerationError."""
    try:
        yield
    except GenerationError:
        raise
    except Exception as error:  # whatever stopped the engine
        raise GenerationError("the engine stopped", status=500) from error


async def _awaited(handle: RequestHandle) -> RequestOutput:
    with _engine_faults():
        return await handle.aresult()


async def _pump(
    number: int, handle: RequestHandle, queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]
) -> None:
    try:
        with _engine_faults():
            async for output in handle:
                await queue.put((number, output))
    except GenerationError as error:
        await queue.put((number, error))
        return
    await queue.put((number, None))


def _checked(output: RequestOutput) -> RequestOutput:
    for choice in output.outputs:
        if choice.finish_reason == "error":
            raise GenerationError(choice.error or "an unknown fault", status=500)
        if choice.finish_reason == "cancelled":
            raise GenerationError(STOPPED, status=503)
    return output
