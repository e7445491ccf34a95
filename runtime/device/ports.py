"""What a device loop asks of a session: a decode step over static tensors, its drafting head, a way to record both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.runtime.device.entry import SamplingMode
from trtllm_replayssm.runtime.device.registers import Registers


class DraftedPort(Protocol):
    """What a drafting head gives: logits [B, V] float32; hidden [B, 1, hidden], to continue from."""

    @property
    def logits(self) -> Tensor:
        """Of each row's draft."""
        ...

    @property
    def hidden(self) -> Tensor:
        """What the draft after it continues from."""
        ...


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

    def draft(self, num_tokens: Tensor, start: Tensor, next_ids: Tensor, hidden: Tensor) -> DraftedPort:
        """Run the head over num_tokens [B] pairs of each row: next_ids [B, t] and hidden [B, t, hidden] from position
        start [B] on. A row without pairs touches nothing.
        """
        ...


@dataclass(frozen=True)
class Committed:
    """What a step has committed: emitted [B] of tokens [B, T]; hidden [B, T, hidden] of the tokens that it ran.

    mode: what the rows need.
    """

    tokens: Tensor
    emitted: Tensor
    hidden: Tensor
    mode: SamplingMode


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

    @property
    def draws(self) -> bool:
        """Whether drafts of sampled requests are drawn, from distributions that it leaves in draft_weights."""
        ...

    def propose(self, registers: Registers, row: Tensor, port: StepPort, done: Committed) -> None:
        """Write draft and draft_count of register rows [B]: at most `registers.draft_room` drafts each.

        Called when the registers hold the step's outcome and the session has committed it.
        """
        ...


class Graphs(Protocol):
    """How work is recorded: `session.capture.GraphPool`."""

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """The work as one launch; the work itself where nothing is recorded. May run it: rows must be padding."""
        ...
