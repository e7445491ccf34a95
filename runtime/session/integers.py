"""Token ids and counts that a caller hands to a session: whole numbers, never cut to one."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

from trtllm_replayssm.checks import shown
from trtllm_replayssm.errors import ContractError

INT64 = (-(1 << 63), (1 << 63) - 1)


def integers(operation: str, argument: str, values: Iterable[object], low: int, high: int) -> list[int]:
    """The values as ints in low..high. Raises ContractError for anything else; a float is never an integer."""
    found = []
    for value in values:
        try:
            number = index(value)  # type: ignore[arg-type]  # refused here when it is none
        except TypeError as error:
            raise ContractError(operation, argument, expected="integers", got=shown(value)) from error
        if not low <= number <= high:
            raise ContractError(operation, argument, expected=f"integers in {low}..{high}", got=shown(number))
        found.append(number)
    return found
