"""Work that would hold the event loop, in threads beside it: few at a time, and a bounded number that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from trtllm_replayssm.runtime.server.errors import OverloadedError

Result = TypeVar("Result")
RETRY_SECONDS = 1.0


class Workers:
    """Runs functions in daemon threads, which do not hold up the process's end. Lives in the event loop's thread."""

    def __init__(self, what: str, *, threads: int, max_waiting: int) -> None:
        """what: the work, for the message of a refusal. threads: at once; max_waiting: before more are refused."""
        self._what = what
        self._free = threads
        self._max_waiting = max_waiting
        self._waiting: list[asyncio.Future[None]] = []

    async def run(self, work: Callable[[], Result]) -> Result:
        """The function's result, or what it raises. OverloadedError (429) when too many wait already.

        A caller that is cancelled leaves at once; its work, if it has begun, keeps its thread until it ends.
        """
        await self._enter()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def finish(result: Result | None, error: BaseException | None) -> None:
            self._leave()
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # None only where Result is

        def body() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as caught:
                error = caught
            try:
                loop.call_soon_threadsafe(finish, result, error)
            except RuntimeError:  # the loop is closed, and nobody waits
                return

        threading.Thread(target=body, name=f"replayssm-{self._what}", daemon=True).start()
        return await done

    async def _enter(self) -> None:
        if self._free:
            self._free -= 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                self._what, expected=f"at most {self._max_waiting} requests that wait for it", got="more", status=429,
                retry_after=RETRY_SECONDS,
            )  # fmt: skip
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled():  # its turn had come
                self._leave()
            raise

    def _leave(self) -> None:
        """Hand the thread to who waits longest."""
        while self._waiting:
            turn = self._waiting.pop(0)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
