"""Decode steps that compute nothing, for the host's own work beside them: what a device would report, from a text."""

from __future__ import annotations

import time
from collections.abc import Sequence

from trtllm_replayssm.runtime.device.entry import DeviceEntry, RowReport, SamplingMode
from trtllm_replayssm.runtime.sampling.distribution import Logits


class IdleSteps:
    """Implements `device_loop.Steps`. Every request goes on through `text`, from a place of its own.

    emitted: tokens of a row's steps, in turn; a step runs 1 + max_draft_len tokens. seconds: what a step takes on the
    device; a read waits for the end of its launch, and launches run one after the other. yields: how often a launch
    lets other threads have the interpreter, as calls of torch do.
    """

    def __init__(
        self, text: Sequence[int], *, emitted: Sequence[int] = (1,), seconds: float = 0.0, yields: int = 0
    ) -> None:
        self.max_draft_len = max(emitted) - 1
        self.waited = 0.0  # seconds that reads waited
        self._text, self._count = [*text, *text[: max(emitted)]], len(text)
        self._emitted, self._seconds, self._yields = emitted, seconds, yields
        self._room: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._flights: list[tuple[float, list[RowReport]]] = []
        self._ready = 0.0
        self._launches = 0

    def warm_up(self) -> None:
        """Nothing is made lazily here."""

    def enter(self, entries: Sequence[DeviceEntry]) -> None:
        for entry in entries:
            self._room[entry.slot] = entry.room
            self._place[entry.slot] = 31 * entry.seed % self._count

    def draw(self, entries: Sequence[DeviceEntry], logits: Sequence[Logits], mode: SamplingMode) -> list[int]:
        return [self._text[0]] * len(entries)

    def launch(self, slots: Sequence[int], mode: SamplingMode) -> bool:
        for _ in range(self._yields):
            time.sleep(0)
        now = time.perf_counter()
        late = bool(self._flights) and now > self._ready
        self._ready = max(now, self._ready) + self._seconds
        self._launches += 1
        self._flights.append((self._ready, [self._report(slot, i) for i, slot in enumerate(slots)]))
        return late

    def read(self) -> list[RowReport]:
        ready, reports = self._flights.pop(0)
        wait = ready - time.perf_counter()
        if self._seconds and wait > 0:
            time.sleep(wait)
            self.waited += wait
        return reports

    def drafts(self, slot: int) -> tuple[tuple[int, ...], None]:
        return (), None

    def _report(self, slot: int, row: int) -> RowReport:
        room, place = self._room[slot], self._place[slot]
        count = min(self._emitted[(row + self._launches) % len(self._emitted)], room)
        self._room[slot], self._place[slot] = room - count, (place + count) % self._count
        return RowReport(tuple(self._text[place : place + count]), 1 + self.max_draft_len if room else 0, broken=False)
