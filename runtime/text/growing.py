"""A text that only grows, piece by piece. It is joined where somebody looks at it, not at every piece."""

from __future__ import annotations

from collections.abc import Iterable


class GrowingText:
    """One thread adds; any thread may read what was there at some number of pieces."""

    __slots__ = ("_joined", "_pieces")

    def __init__(self, pieces: Iterable[str] = ()) -> None:
        """pieces: what is there to begin with, none of them empty."""
        self._pieces = list(pieces)
        self._joined = (0, "")  # a number of pieces and their text: the longest that was asked for

    def __len__(self) -> int:
        """Pieces so far."""
        return len(self._pieces)

    def add(self, piece: str) -> None:
        """Put a piece at the end; an empty one is none."""
        if piece:
            self._pieces.append(piece)

    def first(self, count: int) -> GrowingText:
        """The first `count` pieces, which grow no more with this text."""
        return GrowingText(self._pieces[:count])

    def upto(self, count: int) -> str:
        """The text of the first `count` pieces."""
        known, text = self._joined
        if known > count:
            return "".join(self._pieces[:count])
        if known < count:
            text += "".join(self._pieces[known:count])
            self._joined = (count, text)
        return text

    def between(self, first: int, last: int) -> str:
        """The text of the pieces [first, last), without the others."""
        return "".join(self._pieces[first:last])
