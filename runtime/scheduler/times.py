"""When a request arrived, got its first slot and its first token, and ended: what latencies are computed from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Moments of `time.monotonic`, in seconds; None: not yet. A value: what was published stays as it was."""

    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def after_admission(self) -> RequestTimes:
        """The request got its first slot; later slots, after a preemption, do not count."""
        return self if self.admitted is not None else replace(self, admitted=time.monotonic())

    def after_token(self) -> RequestTimes:
        """The request emitted a token."""
        return self if self.first_token is not None else replace(self, first_token=time.monotonic())

    def after_end(self) -> RequestTimes:
        """Its last choice ended."""
        return replace(self, finished=time.monotonic())
