"""Drafts from the model's multi-token-prediction head within the step: the argmax drafts of `speculative.mtp`."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.runtime.device.ports import Committed, StepPort
from trtllm_replayssm.runtime.device.registers import Registers


class HeadDrafts:
    """See `ports.DraftPort`. The head takes in every committed position, also of a request that ends."""

    positions = 0

    def __init__(self, max_draft_len: int) -> None:
        """max_draft_len: drafts per step, at least one."""
        self.max_draft_len = max_draft_len

    def propose(self, registers: Registers, row: Tensor, room: Tensor, port: StepPort, done: Committed) -> None:
        """See `DraftPort.propose`."""
        start = registers.length[row] - 1 - done.emitted
        drafted = port.draft(done.emitted, start, done.tokens, done.hidden)
        drafts = [drafted.logits.argmax(-1)]
        start = start + done.emitted
        for count in range(1, self.max_draft_len):
            goes_on = (room > count).long()  # no row drafts past its room: behind it there may be no position
            drafted = port.draft(goes_on, start, drafts[-1][:, None], drafted.hidden)
            drafts.append(drafted.logits.argmax(-1))
            start = start + goes_on
        registers.draft[row] = torch.stack(drafts, 1)
        registers.draft_count[row] = torch.where(done.emitted > 0, room.clamp(max=self.max_draft_len), 0)
