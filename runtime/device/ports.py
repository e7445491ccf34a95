"""What a device loop asks of a session: a decode step over static tensors, and a way to capture it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.runtime.device.registers import Registers


class StepPort(Protocol):
    """A step of B rows and T tokens: its inputs are written in place, nothing it does waits for the device.

    ids [B, T] int64; slot [B], -1 for padding; num_tokens [B], 0 for a row that must not move.
    """

    ids: Tensor
    slot: Tensor
    num_tokens: Tensor

    def forward(self) -> ModelOutput[Tensor]:
        """Logits [B, T, V] float32 and final hidden states [B, T, hidden]; appends records, moves no cursor."""
        ...

    def commit(self, accepted: Tensor) -> None:
        """Commit the first accepted [B] tokens of each row."""
        ...


class DraftPort(Protocol):
    """A drafter whose work is part of the step."""

    @property
    def max_draft_len(self) -> int:
        """Drafts per request and step at most."""
        ...

    @property
    def positions(self) -> int:
        """Positions of a request's text that it reads, 0 for none."""
        ...

    def propose(self, registers: Registers, row: Tensor, room: Tensor) -> None:
        """Write draft and draft_count of register rows [B]: at most room [B] drafts each.

        Called when the registers hold the step's outcome and the session has committed it.
        """
        ...
