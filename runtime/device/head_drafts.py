"""Drafts from the model's multi-token-prediction head within the step: those of `speculative.mtp`."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops import native_draw
from trtllm_replayssm.runtime.device.entry import SamplingMode
from trtllm_replayssm.runtime.device.ports import Committed, StepPort
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.device.sampling import draw, uniforms, weights_of
from trtllm_replayssm.spec.philox import Domain


class HeadDrafts:
    """See `ports.DraftPort`. The head takes in every committed position of a request that has room for drafts.

    One without room never drafts again, and its head may lack earlier positions: `speculative.mtp` leaves it out too.
    """

    positions = 0

    def __init__(self, max_draft_len: int, *, draws: bool = False) -> None:
        """max_draft_len: drafts per step, at least one. draws: drafts of sampled requests are drawn, not the argmax."""
        self.max_draft_len = max_draft_len
        self.draws = draws

    def propose(self, registers: Registers, row: Tensor, port: StepPort, done: Committed) -> None:
        """See `DraftPort.propose`."""
        room = registers.draft_room(row)
        start = registers.length[row] - 1 - done.emitted
        taken = torch.where(room > 0, done.emitted, 0)
        drafted = port.draft(taken, start, done.tokens, done.hidden)
        drafts = [self._pick(drafted.logits, registers, row, done.mode, 0)]
        start = start + done.emitted
        for count in range(1, self.max_draft_len):
            goes_on = (room > count).long()  # no row drafts past its room: behind it there may be no position
            drafted = port.draft(goes_on, start, drafts[-1][:, None], drafted.hidden)
            drafts.append(self._pick(drafted.logits, registers, row, done.mode, count))
            start = start + goes_on
        registers.draft[row] = torch.stack(drafts, 1)
        registers.draft_count[row] = torch.where(done.emitted > 0, room.clamp(max=self.max_draft_len), 0)

    def _pick(self, logits: Tensor, registers: Registers, row: Tensor, mode: SamplingMode, ahead: int) -> Tensor:
        """Logits [B, V] of draft number `ahead` -> tokens [B]."""
        if not self.draws or mode is SamplingMode.GREEDY:
            return native_draw.likeliest(logits[:, None])[:, 0]
        best, tokens = logits.max(-1)
        vocab = logits.shape[1]
        weights = weights_of(logits[:, None], best[:, None], registers, row, mode)[:, 0]
        # of a head gone astray any draft will do: it is only rejected
        weights[:, :vocab] = torch.where(torch.isfinite(best)[:, None], weights[:, :vocab], 1.0)
        weights /= weights.sum(-1, keepdim=True, dtype=torch.float64)
        registers.draft_weights[row, ahead] = weights
        u = uniforms(registers, row, 1, Domain.DRAFT, ahead)
        drawn = draw(weights, u[:, 0]).clamp(max=vocab - 1)
        return torch.where(registers.greedy(row), tokens, drawn)
