"""Slot ids: plain ints, owned once, handed out lowest first (B04, B18)."""

from __future__ import annotations

import pytest

from trtllm_replayssm.errors import CapacityError, InvariantError
from trtllm_replayssm.runtime.pools.slots import SlotAllocator


def test_b04_a_held_id_never_changes() -> None:
    """B04: hold an id, free and allocate others, read it again; ids are ints, not views of the free list."""
    slots = SlotAllocator(4)
    held = [slots.allocate() for _ in range(4)]
    assert held == [0, 1, 2, 3] and all(type(s) is int for s in held)
    slots.free(2)
    slots.free(0)
    assert slots.allocate() == 0 and slots.allocate() == 2
    assert held == [0, 1, 2, 3] and slots.used == {0, 1, 2, 3}
    slots.check_integrity()


def test_a_full_allocator_says_how_many_and_stays_whole() -> None:
    slots = SlotAllocator(2)
    slots.allocate(), slots.allocate()
    with pytest.raises(CapacityError, match="all 2 in use"):
        slots.allocate()
    assert slots.num_free == 0
    slots.check_integrity()
    slots.free(1)
    assert slots.allocate() == 1


@pytest.mark.parametrize("slot", [-1, 1, 2, 99])
def test_a_slot_that_is_not_in_use_cannot_be_freed(slot: int) -> None:
    slots = SlotAllocator(2)
    slots.allocate()
    with pytest.raises(InvariantError, match="in use"):
        slots.free(slot)
    slots.free(0)
    with pytest.raises(InvariantError, match="in use"):
        slots.free(0)
    assert slots.num_free == 2


def test_a_lost_or_doubled_id_is_found() -> None:
    slots = SlotAllocator(3)
    slots.allocate()
    slots._free.append(0)
    with pytest.raises(InvariantError, match="once"):
        slots.check_integrity()
