"""HTTP/1.1 as uvicorn speaks it, with this server's error objects for what is not HTTP at all."""

from __future__ import annotations

import asyncio
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from trtllm_replayssm.runtime.server.errors import error_object, error_response

LINGER_SECONDS = 1.0
HALF_CLOSED_SECONDS = 0.05
READ_BYTES = 16 << 10  # thousands of chunks of one byte; parsing each takes some ten microseconds
_MESSAGES = {400: "this is not an HTTP/1.1 request", 431: "the headers are too large"}


class Protocol(H11Protocol):
    """One connection. A request that cannot be parsed is answered in JSON, and the connection ends."""

    _refused = False

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
