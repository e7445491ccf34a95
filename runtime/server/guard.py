"""The outermost layer of the server: limits on bytes and time, the API key, and an answer for whatever goes wrong.

A plain ASGI layer: it reads the whole body, within its limits, before anything parses it, and hands on the
connection's later events untouched, so that endpoints still see a client leave.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trtllm_replayssm.errors import ReplaySSMError, RequestError
from trtllm_replayssm.runtime.server.errors import (
    RETRY,
    TooLargeError,
    UnauthorizedError,
    describe,
    error_object,
    error_response,
)
from trtllm_replayssm.runtime.server.limits import Limits
from trtllm_replayssm.runtime.server.run import STOPPED
from trtllm_replayssm.runtime.server.shares import Bodies, Share
from trtllm_replayssm.runtime.server.stream import EVENTS, error_event

_LOG = logging.getLogger(__name__)
# Without a key: liveness for load balancers, counters, and the page that shows them. No text and no tokens.
OPEN_PATHS = frozenset({"/", "/status.json", "/health", "/version", "/metrics", "/prometheus/metrics"})


class Guard:
    """Wraps the application."""

    def __init__(self, app: ASGIApp, limits: Limits, api_key: str | None, stopping: Callable[[], bool]) -> None:
        """stopping: whether the server stops, so that a task that is cancelled is to answer that."""
        self._app = app
        self._stopping = stopping
        self._limits = limits
        self.bodies = Bodies(limits.all_bodies_bytes)
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = origin_form(scope)
        started = streaming = False
        share = self.bodies.share()

        async def sending(message: Message) -> None:
            nonlocal started, streaming
            if message["type"] == "http.response.start":
                started = True
                streaming = (b"content-type", EVENTS) in message["headers"]
            elif not message.get("more_body", False):
                streaming = False
            await send(message)

        try:
            self._check_headers(scope)
            body = await self._body(receive, share)
            if body is not None:  # None: the client left before its body was complete
                await self._app(scope, _replay(body, receive), sending)
        except asyncio.TimeoutError:
            await error_response(408, error_object(408, "the body took too long"), _CLOSE)(scope, receive, send)
        except ReplaySSMError as error:
            status, content, headers = describe(error)
            await error_response(status, content, {**headers, **_CLOSE})(scope, receive, send)
        except asyncio.CancelledError:  # what is left when the server's time to stop has run out
            if not self._stopping() or (started and not streaming):
                raise
            stopped = error_object(503, STOPPED, code="server_stopping")
            if streaming:
                await sending({"type": "http.response.body", "body": error_event(stopped), "more_body": False})
            else:
                await error_response(503, stopped, {**RETRY, **_CLOSE})(scope, receive, send)
        except Exception as error:
            _LOG.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                status, content, headers = describe(error)
                await error_response(status, content, headers)(scope, receive, send)
        finally:
            share.give_back()

    def _check_headers(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers) + len(scope["raw_path"] or b"")
        if size + len(scope["query_string"]) > self._limits.header_bytes:
            raise TooLargeError("headers", limit=self._limits.header_bytes, status=431)
        if self._api_key is not None and scope["path"] not in OPEN_PATHS:
            self._check_key(headers)
        names = {name for name, _ in headers}
        if {b"content-length", b"transfer-encoding"} <= names:  # a proxy in front might see another end of the body
            raise RequestError("HTTP", "Content-Length", expected="no Transfer-Encoding beside it", got="both")
        for name, value in headers:
            if name == b"content-encoding" and value.lower() != b"identity":
                raise RequestError("HTTP", "Content-Encoding", expected="identity", got=value.decode("latin-1")[:40])
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._limits.body_bytes:
                raise TooLargeError("body", limit=self._limits.body_bytes, status=413)

    def _check_key(self, headers: list[tuple[bytes, bytes]]) -> None:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        assert self._api_key is not None, "called with a key set"
        if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
            raise UnauthorizedError(
                "HTTP", "Authorization", expected="Bearer and the server's API key", got="none, or another"
            )

    async def _body(self, receive: Receive, share: Share) -> bytes | None:
        return await asyncio.wait_for(self._read(receive, share), self._limits.body_seconds)

    async def _read(self, receive: Receive, share: Share) -> bytes | None:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.body_bytes:
                raise TooLargeError("body", limit=self._limits.body_bytes, status=413)
            share.take(len(parts[-1]))
            if not message.get("more_body", False):
                return b"".join(parts)


def origin_form(scope: Scope) -> Scope:
    """A scope whose path begins with a slash: servers must take `GET http://host/path` as well (RFC 9112, 3.2.2)."""
    path, raw = scope["path"], scope.get("raw_path") or b""
    if not path.lower().startswith(("http://", "https://")):
        return scope
    _, _, path = path.split("://", 1)[1].partition("/")
    _, _, raw = raw.partition(b"://")[2].partition(b"/")
    return {**scope, "path": "/" + path, "raw_path": b"/" + raw}


_CLOSE = {"Connection": "close"}  # what is left of the request is not read


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once, then the connection's own events."""
    left = [body]

    async def replayed() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return replayed
