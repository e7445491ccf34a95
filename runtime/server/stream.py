"""Responses that notice when the client leaves: server-sent events, and waiting for a result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.runtime.server.errors import describe

Result = TypeVar("Result")
DONE = "data: [DONE]\n\n"
EVENTS = b"text/event-stream; charset=utf-8"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold events back
# Line ends of Unicode that JSON need not escape, and at which some clients split a stream's lines.
_LINE_ENDS = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
_NO_CHOICES = '"choices":[]'
CLIENT_CLOSED = 499  # nobody reads it; access logs show it


class ClientGoneError(ReplaySSMError):
    """The client closed its connection before the answer was ready."""


class Shell:
    """The JSON of a response or chunk around its choices: the same in all chunks of a stream, and written once."""

    def __init__(self, part: BaseModel, *, usage: bool = True) -> None:
        """part: with no choices yet. usage: whether it has the field of token counts."""
        data = part.model_dump_json(exclude=None if usage else {"usage"})
        self._head, empty, self._tail = data.partition(_NO_CHOICES)
        assert empty, "a list without choices; text has its quotes escaped and never looks like one"

    def around(self, *choices: str) -> str:
        """The whole. choices: JSON of each."""
        return f'{self._head}"choices":[{",".join(choices)}]{self._tail}'


def event(data: str) -> str:
    """One server-sent event, its data (JSON) on one line."""
    return f"data: {data if data.isascii() else data.translate(_LINE_ENDS)}\n\n"


def error_event(content: dict[str, Any]) -> bytes:
    """The end of a stream that cannot go on: its error object, then the end mark."""
    return f"data: {json.dumps(content)}\n\n{DONE}".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result] | asyncio.Future[Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientGoneError then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("HTTP", "connection", expected="a client that waits", got="one that left")
        return task.result()
    finally:
        await _ended(task, gone)


class EventStream(Response):
    """Server-sent events of an iterator. It is closed, and `on_close` called, when the client leaves at any time."""

    def __init__(self, events: AsyncGenerator[str, None], on_close: Callable[[], None]) -> None:
        super().__init__(headers={**_HEADERS, "Content-Type": EVENTS.decode()})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come."""
        sender, gone = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            self._on_close()
            await _ended(sender, gone)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for text in events:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        except ReplaySSMError as error:  # the status line is out, so the error travels as an event
            await send({"type": "http.response.body", "body": error_event(describe(error)[1]), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what has not ended and wait for it; its outcome was read where it mattered."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
