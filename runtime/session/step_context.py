"""What the stateful operations of one forward pass need to know about its rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import StepRows


class Phase(Enum):
    """Which operations a forward pass runs: a prompt chunk, a decode / verify step, or the drafting head on at most
    T_max pairs a row, which needs no state but keys and values.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class HostRow:
    """One row of a pass: see `StepContext`."""

    slot: int
    num_tokens: int
    start: int
    last_chunk: bool


@dataclass(frozen=True)
class StepContext:
    """rows: checked slots and token counts; start [B] int64: absolute position of each row's first token.

    last_chunk [B] bool: rows whose prompt ends with this chunk (PREFILL only). own_logits: of several ranks that cut
    the vocabulary, each shall keep its part.
    """

    phase: Phase
    rows: StepRows
    start: Tensor
    width: int
    last_chunk: Tensor
    own_logits: bool = False

    @cached_property
    def on_host(self) -> list[HostRow]:
        """The rows as the host sees them; waits for the device, once a pass."""
        columns = (self.rows.slot, self.rows.num_tokens, self.start, self.last_chunk)
        table = torch.stack([column.long() for column in columns], dim=1).tolist()
        return [HostRow(slot, count, start, bool(last)) for slot, count, start, last in table]

    @cached_property
    def int32_rows(self) -> dict[str, Tensor]:
        """slot, start, num_tokens [B] int32, as the attention kernels take them."""
        rows = self.rows
        return {"slot": rows.slot_int32, "start": self.start.int(), "num_tokens": rows.num_tokens_int32}

    def positions(self) -> Tensor:
        """[B, T] absolute positions."""
        return self._positions

    def valid(self) -> Tensor:
        """[B, T] bool: tokens that exist."""
        return self._valid

    @cached_property
    def _positions(self) -> Tensor:
        return self.start[:, None] + torch.arange(self.width, device=self.start.device)

    @cached_property
    def _valid(self) -> Tensor:
        inside = torch.arange(self.width, device=self.start.device) < self.rows.num_tokens[:, None]
        return inside & (self.rows.slot >= 0)[:, None]
