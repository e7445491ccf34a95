"""When a request arrived, got its first slot and its first token, and ended: what latencies are computed from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestTimes:
    """Moments of `time.monotonic`, in seconds; None: not yet."""

    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def copy(self) -> RequestTimes:
        """The moments so far."""
        return RequestTimes(self.arrived, self.admitted, self.first_token, self.finished)

    def admit(self) -> None:
        """The request got its first slot; later slots, after a preemption, do not count."""
        self.admitted = self.admitted or time.monotonic()

    def emit(self) -> None:
        """The request emitted a token."""
        self.first_token = self.first_token or time.monotonic()

    def finish(self) -> None:
        """Its last choice ended."""
        self.finished = time.monotonic()
