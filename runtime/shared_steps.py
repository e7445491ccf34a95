"""The device side of the decode loop over several ranks: every rank steps alike, and the first one reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trtllm_replayssm.runtime.device.entry import DeviceEntry, RowReport, SamplingMode
from trtllm_replayssm.runtime.device_loop import Steps
from trtllm_replayssm.runtime.sampling.distribution import Logits

_NAME = "steps"


class Parts(Protocol):
    """A session of several ranks that makes the same things over each: `session.shared_session.SharedSession`."""

    def make_part(self, name: str, maker: Callable[..., Any], *arguments: Any) -> Any:
        """maker(session, *arguments) on every rank -> the first rank's."""
        ...

    def call_part(self, name: str, method: str, *arguments: Any) -> Any:
        """The same call of it on every rank -> the first rank's answer."""
        ...


class SharedSteps:
    """Implements `device_loop.Steps`. Ranks have the same logits and registers, so they emit the same tokens."""

    def __init__(self, session: Parts, make: Callable[..., Steps], *arguments: Any) -> None:
        """make(session, *arguments): one rank's steps; a function of a module."""
        self._session = session
        self._own: Steps = session.make_part(_NAME, make, *arguments)

    @property
    def max_draft_len(self) -> int:
        """See `Steps.max_draft_len`."""
        return self._own.max_draft_len

    def warm_up(self) -> None:
        """See `Steps.warm_up`."""
        self._session.call_part(_NAME, "warm_up")

    def enter(self, entries: Sequence[DeviceEntry]) -> None:
        """See `Steps.enter`."""
        if entries:
            self._session.call_part(_NAME, "enter", list(entries))

    def draw(self, entries: Sequence[DeviceEntry], logits: Sequence[Logits], mode: SamplingMode) -> list[int]:
        """See `Steps.draw`: registers of its own, so the first rank does it alone."""
        return self._own.draw(entries, logits, mode)

    def launch(self, slots: Sequence[int], mode: SamplingMode) -> bool:
        """See `Steps.launch`: the first rank's answer."""
        late: bool = self._session.call_part(_NAME, "launch", list(slots), mode)
        return late

    def read(self) -> list[RowReport]:
        """See `Steps.read`."""
        reports: list[RowReport] = self._session.call_part(_NAME, "read")
        return reports

    def drafts(self, slot: int) -> tuple[tuple[int, ...], Any]:
        """See `Steps.drafts`: they are the same on every rank."""
        return self._own.drafts(slot)
