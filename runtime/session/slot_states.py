"""What a session keeps of each slot, in three places that must agree: the pools, the host's copies of the positions,
and the drafting head's hidden states. No step runs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.pools.snapshot import RawArray, Snapshot, from_arrays
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.mtp_head import MtpHead
from trtllm_replayssm.runtime.session.positions import Positions


class SlotStates:
    """Slots as they are taken, copied, saved and given back; none of them has a step that awaits its commit."""

    def __init__(self, pools: StatePools, positions: Positions, head: MtpHead) -> None:
        self._pools, self._positions, self._head = pools, positions, head

    def acquire(self, seed: int) -> int:
        """See `Session.allocate`."""
        slot = self._pools.acquire(seed)
        self._positions.forget([slot])
        return slot

    def release(self, slot: int) -> None:
        """See `Session.free`."""
        self._pools.release(slot)
        self._head.forget(slot)

    def moved(self, slots: Sequence[int]) -> None:
        """Steps that were not the session's own have moved these slots: what the host knew of them is of the past."""
        self._positions.forget(slots)
        for slot in slots:
            self._head.forget(slot)

    def fork(self, slot: int, seed: int) -> int:
        """See `Session.fork`."""
        copy = self._pools.fork(slot, seed)
        self._positions.forget([copy])
        self._head.copy(slot, copy)
        return copy

    def save(self, slot: int, since: int) -> Snapshot:
        """See `Session.save`. The hidden state goes with it where it is that of the slot's last position; after steps
        that were not the session's own it is not, and nobody can draft from the snapshot until a step has run.
        """
        snapshot = self._pools.save(slot, since)
        last = self._head.last(slot, snapshot.position)
        return snapshot if last is None else replace(snapshot, hidden=last.cpu().clone())

    def restore(self, snapshot: Snapshot, before: Sequence[Snapshot], seed: int | None) -> int:
        """See `Session.restore`."""
        slot = self._pools.restore(snapshot, before, seed)
        self._positions.forget([slot])
        if snapshot.hidden is not None:
            device = self._pools.cursors.position.device
            self._head.keep_chunk(slot, snapshot.position - 1, snapshot.hidden.to(device))
        return slot

    def load(self, position: int, arrays: Mapping[str, RawArray], *, prompt_done: bool) -> Snapshot:
        """See `Session.load_snapshot`."""
        snapshot = self._pools.require_snapshot(from_arrays(position, self._pools.signature, arrays))
        if prompt_done and snapshot.carry:
            raise ContractError("load_snapshot", "carry", expected="none (the prompt is complete)", got="one")
        return snapshot
