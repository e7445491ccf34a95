"""Rows of a step moved to the rows of their slots and back: engines keep row b of a step in row b of the caches.

All of it is work on the device whose launches depend on shapes alone, so that it can be recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.runtime.session.step_context import StepContext


def rows_for(slots: Sequence[int]) -> int:
    """Rows that a step over `slots` (-1: padding) needs: one for each, and every slot's own."""
    return max(len(slots), max(slots, default=-1) + 1)


@dataclass(frozen=True)
class SlotRows:
    """place [B] int64: the row out of 0..count-1 that a step's row is moved to; `count`: it takes no part.

    HAZARD: every slot is below `count`; nothing here can check it.
    """

    count: int
    place: Tensor

    @staticmethod
    def of(rows: StepRows, slots: int) -> SlotRows:
        """For a step of B rows over a pool of `slots` slots; rows without tokens take no part."""
        count = min(len(rows.slot), slots)
        exists = (rows.slot >= 0) & (rows.num_tokens > 0)
        return SlotRows(count, torch.where(exists, rows.slot, count).long())

    def scatter(self, values: Tensor, empty: int = 0) -> Tensor:
        """values [B, ...] -> [count, ...], `empty` in the rows of slots that take no part."""
        dense = torch.full((self.count + 1, *values.shape[1:]), empty, dtype=values.dtype, device=values.device)
        return dense.index_copy_(0, self.place, values)[: self.count]

    def gather(self, dense: Tensor) -> Tensor:
        """dense [count, ...] -> [B, ...], a copy; what rows that take no part get means nothing."""
        return dense.index_select(0, self.place.clamp(max=self.count - 1))

    def context(self, context: StepContext, nowhere: int) -> StepContext:
        """The moved rows' context. Slots that take no part are padding: they keep their state, and what engines write
        for them, which write every row's T tokens, goes to the positions from `nowhere` on, which no slot reads.
        """
        slot = self.scatter(context.rows.slot.long(), -1)
        rows = StepRows(slot, self.scatter(context.rows.num_tokens.long()))
        every = torch.ones(self.count, dtype=torch.bool, device=slot.device)
        return StepContext(context.phase, rows, self.scatter(context.start, nowhere), context.width, every)
