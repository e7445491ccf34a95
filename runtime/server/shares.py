"""Bytes of request bodies that the server holds at one moment, all connections together."""

from __future__ import annotations

from trtllm_replayssm.runtime.server.errors import OverloadedError

RETRY_SECONDS = 1.0


class Bodies:
    """The whole; lives in the event loop's thread."""

    def __init__(self, limit: int) -> None:
        """limit: bytes of all bodies together."""
        self.limit = limit
        self.held = 0

    def share(self) -> Share:
        """The part of one request, which it must give back."""
        return Share(self)


class Share:
    """What one request holds."""

    def __init__(self, whole: Bodies) -> None:
        self._whole = whole
        self._held = 0

    def take(self, size: int) -> None:
        """More bytes have come. Raises OverloadedError (429) where all together would be too many."""
        if self._whole.held + size > self._whole.limit:
            raise OverloadedError(
                "body", expected=f"at most {self._whole.limit} bytes of bodies at once", got="more", status=429,
                retry_after=RETRY_SECONDS,
            )  # fmt: skip
        self._whole.held += size
        self._held += size

    def give_back(self) -> None:
        """The request has ended."""
        self._whole.held -= self._held
        self._held = 0
