"""A JSON document that nobody vouches for, read value by value: each is held to a type and a range, or refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trtllm_replayssm.checks import shown
from trtllm_replayssm.errors import CheckpointError


class Part:
    """One value and where it stands. Every reader raises CheckpointError, which names the place, for another value."""

    def __init__(self, value: Any, where: str) -> None:
        self._value = value
        self.where = where

    @property
    def missing(self) -> bool:
        """Whether it is null."""
        return self._value is None

    def fields(self, names: Iterable[str]) -> dict[str, Part]:
        """The parts of an object that has exactly these names."""
        wanted = sorted(names)
        if not isinstance(self._value, dict) or sorted(self._value) != wanted:
            found = sorted(self._value) if isinstance(self._value, dict) else self._value
            raise self.refusal(f"an object of {', '.join(wanted)}", shown(found, 400))
        return {name: Part(self._value[name], f"{self.where}.{name}") for name in wanted}

    def items(self, least: int = 0, most: int | None = None) -> list[Part]:
        """The parts of a list of least..most items."""
        value = self._value
        if not isinstance(value, list) or len(value) < least or (most is not None and len(value) > most):
            raise self.refusal(f"a list of {least}..{'any number of' if most is None else most} items")
        return [Part(item, f"{self.where}[{i}]") for i, item in enumerate(value)]

    def integer(self, low: int, high: int) -> int:
        """An integer in low..high; booleans are none."""
        value = self._value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refusal(f"an integer in {low}..{high}")
        return value

    def integers(self, low: int, high: int, most: int | None = None) -> list[int]:
        """A list of integers in low..high, of at most `most`."""
        return [item.integer(low, high) for item in self.items(0, most)]

    def number(self, low: float, high: float) -> float:
        """A number in low..high; NaN, booleans and integers beyond every float are none."""
        value = self._value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.refusal(f"a number in {low:g}..{high:g}")
        try:
            return float(value)
        except OverflowError as error:  # within infinite bounds
            raise self.refusal(f"a number in {low:g}..{high:g} that a float holds") from error

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self._value, bool):
            raise self.refusal("true or false")
        return self._value

    @property
    def is_text(self) -> bool:
        """Whether it is a string."""
        return isinstance(self._value, str)

    def text(self) -> str:
        """A string."""
        if not isinstance(self._value, str):
            raise self.refusal("a string")
        return self._value

    def scalar(self) -> object:
        """A number, string, boolean or null as it is, for a reader that checks it itself."""
        if isinstance(self._value, (dict, list)):
            raise self.refusal("a number, a string, true, false or null")
        return self._value

    def refusal(self, expected: object, got: object = None) -> CheckpointError:
        """The error to raise for this part; got: None for its value."""
        return CheckpointError(
            "import_request", self.where, expected=expected, got=shown(self._value) if got is None else got,
            hint="Export the request again: the file was changed or written by something else",
        )  # fmt: skip
