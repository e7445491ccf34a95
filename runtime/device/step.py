"""One whole decode step on the device: inputs, forward pass, sampling, acceptance, commit, next inputs, drafts.

Everything between two steps is in the registers, so a step can be launched before the host has seen the one before it;
a row whose request has ended meanwhile runs as one of no tokens and moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.runtime.device.acceptance import accept_drawn, agreed, cut
from trtllm_replayssm.runtime.device.entry import SamplingMode
from trtllm_replayssm.runtime.device.ports import Committed, DraftPort, StepPort
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.device.sampling import pick, weights_of

EXTRA = 3  # columns of a report beside the tokens: emitted, tokens the row ran, broken


@dataclass(frozen=True)
class Chosen:
    """Tokens [B, T] int64 behind each position, and whether their logits are finite [B, T], bool or 0 and 1.

    count [B] int64: how many stand before any end; None: the drafts that agree, and one more.
    """

    tokens: Tensor
    finite: Tensor
    count: Tensor | None


class DeviceStep:
    """A step of fixed shape over the registers.

    report [B, T + EXTRA] int64, overwritten by each run: the tokens drawn, of which the first `emitted` count; emitted;
    the row's tokens (base and drafts), 0 when its request had ended before; 1 when its logits are no finite numbers.
    """

    def __init__(self, port: StepPort, registers: Registers, drafter: DraftPort | None, mode: SamplingMode) -> None:
        """mode: at least what the rows need."""
        self.port = port
        batch, width = port.ids.shape
        self.report = torch.zeros((batch, width + EXTRA), dtype=torch.int64, device=port.ids.device)
        self._registers = registers
        self._drafter = drafter
        self._mode = mode
        self._place = torch.arange(width, device=port.ids.device)

    @torch.inference_mode()
    def run(self) -> None:
        """Run the rows whose slots `port.slot` names. No host synchronisation where the port has none."""
        port, registers = self.port, self._registers
        row = self._inputs()
        output = port.forward()
        chosen = self._chosen(output.logits, row)
        emitted = self._outcome(chosen, row)
        port.commit(emitted)
        if self._drafter is not None:
            done = Committed(chosen.tokens, emitted, output.hidden, self._mode)
            self._drafter.propose(registers, row, port, done)

    def _inputs(self) -> Tensor:
        """Fill the port's ids and num_tokens -> register rows [B] int64."""
        port, registers = self.port, self._registers
        width = port.ids.shape[1]
        row = registers.rows(port.slot)
        alive = (port.slot >= 0) & (registers.room[row] > 0)
        draft_count = registers.draft_count[row].clamp(max=width - 1)
        port.num_tokens.copy_(torch.where(alive, 1 + draft_count, 0))
        port.ids.copy_(torch.cat([registers.last[row][:, None], registers.draft[row][:, : width - 1]], 1))
        return row

    def _chosen(self, logits: Tensor, row: Tensor) -> Chosen:
        """Tokens of the step's logits [B, T, V]."""
        if self._mode is SamplingMode.GREEDY or self._drafter is None or not self._drafter.draws:
            return self._picked(logits, row)
        best, tokens = logits.max(-1)
        weights = weights_of(logits, best, self._registers, row, self._mode)
        drafts, draft_count = self._drafts(row)
        drawn, count = accept_drawn(weights, drafts, draft_count, self._registers, row)
        greedy = self._registers.greedy(row)
        return Chosen(
            torch.where(greedy[:, None], tokens, drawn),
            torch.isfinite(best),
            torch.where(greedy, agreed(tokens, drafts, draft_count), count),
        )

    def _picked(self, logits: Tensor, row: Tensor) -> Chosen:
        """Tokens that do not depend on the drafts."""
        picked = pick(logits, self._registers, row, self._mode)
        return Chosen(picked.tokens, picked.finite, None)

    def _drafts(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """The drafts that the step ran: ids [B, T - 1] and how many exist [B]."""
        drafts = self._registers.draft[row][:, : self.port.ids.shape[1] - 1]
        return drafts, (self.port.num_tokens - 1).clamp(min=0).long()

    def _outcome(self, chosen: Chosen, row: Tensor) -> Tensor:
        """Registers and report after the step -> tokens that count [B]: what is emitted is the text, its last token
        the next base."""
        registers, tokens = self._registers, chosen.tokens
        num_tokens = self.port.num_tokens.long()
        broken = (~chosen.finite & (self._place < num_tokens[:, None])).any(-1)
        count = agreed(tokens, *self._drafts(row)) if chosen.count is None else chosen.count
        verdict = cut(tokens, count, num_tokens > 0, broken, registers, row)
        emitted, length = verdict.emitted, registers.length[row]
        if registers.keeps_history:  # what does not count lies behind the length, where nobody reads
            registers.history[row[:, None], length[:, None] + self._place] = tokens
        last = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None])[:, 0]
        registers.last[row] = torch.where(emitted > 0, last, registers.last[row])
        registers.length[row] = length + emitted
        registers.room[row] = torch.where(verdict.ended, 0, registers.room[row] - emitted)
        self.report.copy_(torch.cat([tokens, torch.stack([emitted, num_tokens, broken.long()], 1)], 1))
        return emitted
