"""Host copies of the slots' positions, so that checking a step's room waits for nothing."""

from __future__ import annotations

from collections.abc import Iterable

from trtllm_replayssm.ops.layer_state import CursorTensors


class Positions:
    """Follows the device's `position` of each slot; one that is not known is read from the device once."""

    def __init__(self, cursors: CursorTensors) -> None:
        self._cursors = cursors
        self._known: dict[int, int] = {}

    def of(self, slot: int) -> int:
        """Committed tokens of a slot."""
        if slot not in self._known:
            self._known[slot] = int(self._cursors.position[slot])
        return self._known[slot]

    def advance(self, slot: int, tokens: int) -> None:
        """The slot's position has moved on the device by `tokens`."""
        if slot in self._known:
            self._known[slot] += tokens

    def forget(self, slots: Iterable[int]) -> None:
        """The slots' positions may be anything now."""
        for slot in slots:
            self._known.pop(slot, None)
