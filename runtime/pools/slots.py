"""Slot ids: allocate, free, check. Plain ints, no tensors; the lowest free id is handed out first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from trtllm_replayssm.errors import CapacityError, ContractError, InvariantError


class SlotAllocator:
    """Ids 0..capacity-1, each owned by nobody or by one sequence."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = list(range(capacity))
        self._used: set[int] = set()
        self._torn: set[int] = set()

    @property
    def capacity(self) -> int:
        """All slots."""
        return self._capacity

    @property
    def num_free(self) -> int:
        """Slots that can be handed out."""
        return len(self._free)

    @property
    def used(self) -> frozenset[int]:
        """Slots handed out."""
        return frozenset(self._used)

    def allocate(self) -> int:
        """A free slot. Raises CapacityError when all are taken."""
        if not self._free:
            raise CapacityError(
                "allocate slot", "slots", expected="a free slot", got=f"all {self._capacity} in use",
                hint="Wait for a sequence to finish, preempt one, or make the pool larger",
            )  # fmt: skip
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back. Raises InvariantError for one that is not in use."""
        self.require_used("free slot", slot)
        self._used.remove(slot)
        self._torn.discard(slot)
        heapq.heappush(self._free, slot)

    def require_used(self, operation: str, slot: int) -> None:
        """Raise InvariantError unless the slot is handed out."""
        if slot not in self._used:
            raise InvariantError(operation, "slot", expected=f"a slot in use, one of {sorted(self._used)}", got=slot)

    def tear(self, slots: Iterable[int]) -> None:
        """Mark slots whose step failed half-way: some layers are ahead of others, so they can only be freed."""
        self._torn |= set(slots) & self._used

    def require_whole(self, operation: str, slot: int) -> None:
        """Raise unless the slot is handed out (InvariantError) and no step over it has failed (ContractError)."""
        self.require_used(operation, slot)
        if slot in self._torn:
            raise ContractError(
                operation, "slot", expected="a slot whose last step finished", got=f"slot {slot}, whose step failed",
                hint="Free it and run its sequence again",
            )  # fmt: skip

    def check_integrity(self) -> None:
        """Every id is exactly once free or used. Raises InvariantError."""
        if sorted([*self._free, *self._used]) != list(range(self._capacity)):
            raise InvariantError(
                "check_integrity", "slots", expected=f"each of 0..{self._capacity - 1} free or used, once",
                got=f"free {sorted(self._free)}, used {sorted(self._used)}",
            )  # fmt: skip
