"""Stop strings in a stream of text: found however the text is cut into pieces, and never sent on.

The stop that is complete first wins; of several that end at the same character, the longest. Text that may still
become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopPiece:
    """text: what may be sent on; stop: the stop string that was found, None to go on."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Looks for stop strings in the text of one sequence."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        """include_stop: whether the text sent on keeps the stop string."""
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> StopPiece:
        """Add a piece of text. armed: False lets stops that end inside this piece pass."""
        text = self._held + piece
        if armed:
            found = self._first(text, len(self._held))
            if found is not None:
                end, stop = found
                self._held = ""
                return StopPiece(text[: end if self._include else end - len(stop)], stop)
        keep = self._prefix_length(text)
        self._held = text[len(text) - keep :]
        return StopPiece(text[: len(text) - keep])

    def finish(self) -> str:
        """The text held back, when the sequence ends for another reason."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str, done: int) -> tuple[int, str] | None:
        """(end, stop) of the match that ends first after `done` characters, the longest of those that end there."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, done - len(stop) + 1))
            if at < 0:
                continue
            end = at + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = (end, stop)
        return best

    def _prefix_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string without completing it."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
