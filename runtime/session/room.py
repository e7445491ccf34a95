"""Checks that slots can take a step's tokens, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.positions import Positions


def require_room(
    pools: StatePools, positions: Positions, operation: str, rows: Iterable[tuple[int, int]], *, least: int
) -> None:
    """Every (slot, token count) is a whole slot in use whose cache has room for the tokens, `least` of them or more."""
    for slot, count in rows:
        pools.slots.require_whole(operation, slot)
        room = pools.pool.max_seq_len - positions.of(slot)
        if not least <= count <= room:
            raise ContractError(
                operation, f"tokens of slot {slot}", expected=f"{least}..{room} (max_seq_len {pools.pool.max_seq_len})",
                got=count,
            )  # fmt: skip
