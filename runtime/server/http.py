"""HTTP/1.1 as uvicorn speaks it, with this server's error objects for what is not HTTP at all."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from trtllm_replayssm.runtime.server.errors import error_object, error_response

LINGER_SECONDS = 1.0
HALF_CLOSED_SECONDS = 0.05
READ_BYTES = 16 << 10  # thousands of chunks of one byte; parsing each takes some ten microseconds
_MESSAGES = {400: "this is not an HTTP/1.1 request", 431: "the headers are too large"}


class Connection(h11.Connection):
    """h11's, which takes many times as long for a chunk of a stream as the chunk's few bytes around its data need."""

    _chunked = False

    def send(self, event: Any) -> Any:  # of h11's overloads
        """The bytes of an event, as h11 makes them. Data moves no state of a connection whose body goes in chunks."""
        if self._chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        found = super().send(event)
        if type(event) is h11.Response:
            self._chunked = found is not None and b"\r\ntransfer-encoding: chunked\r\n" in found.lower()
        return found


class Protocol(H11Protocol):
    """One connection. A request that cannot be parsed is answered in JSON, and the connection ends."""

    _refused = False

    def __init__(self, config: Config, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        self.conn = Connection(h11.SERVER, config.h11_max_incomplete_event_size or READ_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection. Little is read at once, because all of it is parsed at once."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's, 256 KiB before

    def send_400_response(self, msg: str) -> None:
        """Called while the parser's error is handled: the error knows the better status."""
        error = sys.exc_info()[1]
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        status = hint if hint in _MESSAGES else 400
        detail = f": {error}"[:200] if isinstance(error, h11.RemoteProtocolError) and status == 400 else ""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error_response(status, error_object(status, _MESSAGES[status] + detail))
            headers = [*response.raw_headers, (b"connection", b"close")]
            events = (
                h11.Response(status_code=status, headers=headers), h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            )  # fmt: skip
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
            self._linger()
        else:
            self.transport.close()  # an answer had begun; its end without a last chunk says that it is cut

    def data_received(self, data: bytes) -> None:
        """Bytes of the client; those behind a refusal are thrown away."""
        if not self._refused:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Most have left; one that still reads is given what is ready in a moment."""
        self.loop.call_later(HALF_CLOSED_SECONDS, self.transport.close)
        return True

    def _linger(self) -> None:
        """Close, but read on for a moment: closing with bytes unread would take the refusal from the client."""
        self._refused = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
