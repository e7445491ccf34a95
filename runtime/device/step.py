"""One whole decode step on the device: inputs, forward pass, sampling, acceptance, commit, next inputs, drafts.

Everything between two steps is in the registers, so a step can be launched before the host has seen the one before it;
a row whose request has ended meanwhile runs as one of no tokens and moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.runtime.device.acceptance import Verdict, accept_drawn, agreed, cut
from trtllm_replayssm.runtime.device.entry import SamplingMode
from trtllm_replayssm.runtime.device.ports import Committed, DraftPort, StepPort
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.device.sampling import pick, weights_of

EXTRA = 3  # columns of a report beside the tokens: emitted, tokens the row ran, broken


@dataclass(frozen=True)
class _Judged:
    """Tokens [B, T], whether their logits are finite [B, T] bool, and how many count [B] before any end."""

    tokens: Tensor
    finite: Tensor
    count: Tensor


class DeviceStep:
    """A step of fixed shape over the registers.

    report [B, T + EXTRA] int64, overwritten by each run: the tokens drawn, of which the first `emitted` count; emitted;
    the row's tokens (base and drafts), 0 when its request had ended before; 1 when its logits are no finite numbers.
    """

    def __init__(
        self, port: StepPort, registers: Registers, drafter: DraftPort | None, mode: SamplingMode, *,
        native: bool = False,
    ) -> None:  # fmt: skip
        """mode: at least what the rows need. native: the kernel draws where no distributions are wanted."""
        self.port = port
        batch, width = port.ids.shape
        self.report = torch.zeros((batch, width + EXTRA), dtype=torch.int64, device=port.ids.device)
        self._registers = registers
        self._drafter = drafter
        self._mode = mode
        self._native = native
        self._place = torch.arange(width, device=port.ids.device)

    @torch.inference_mode()
    def run(self) -> None:
        """Run the rows whose slots `port.slot` names. No host synchronisation where the port has none."""
        port, registers = self.port, self._registers
        width = port.ids.shape[1]
        row = registers.rows(port.slot)
        alive = (port.slot >= 0) & (registers.room[row] > 0)
        drafts, draft_count = registers.draft[row][:, : width - 1], registers.draft_count[row].clamp(max=width - 1)
        num_tokens = torch.where(alive, 1 + draft_count, 0)
        port.num_tokens.copy_(num_tokens)
        port.ids.copy_(torch.cat([registers.last[row][:, None], drafts], 1))
        output = port.forward()
        judged = self._judge(output.logits, row, drafts, draft_count)
        broken = (~judged.finite & (self._place < num_tokens[:, None])).any(-1)
        tokens, verdict = judged.tokens, cut(judged.tokens, judged.count, alive, broken, registers, row)
        port.commit(verdict.emitted)
        self._advance(row, tokens, verdict)
        if self._drafter is not None:
            room = (registers.room[row] - 1).clamp(min=0)
            done = Committed(tokens, verdict.emitted, output.hidden, self._mode)
            self._drafter.propose(registers, row, room, port, done)
        self.report.copy_(torch.cat([tokens, torch.stack([verdict.emitted, num_tokens, broken.long()], 1)], 1))

    def _judge(self, logits: Tensor, row: Tensor, drafts: Tensor, draft_count: Tensor) -> _Judged:
        """Tokens of the step's logits [B, T, V], and how many of them the drafts leave standing."""
        registers, mode = self._registers, self._mode
        if mode is SamplingMode.GREEDY or self._drafter is None or not self._drafter.draws:
            picked = pick(logits, registers, row, mode, native=self._native)
            return _Judged(picked.tokens, picked.finite, agreed(picked.tokens, drafts, draft_count))
        best, tokens = logits.max(-1)
        weights = weights_of(logits, best, registers, row, mode)
        drawn, count = accept_drawn(weights, drafts, draft_count, registers, row)
        greedy = registers.greedy(row)
        return _Judged(
            torch.where(greedy[:, None], tokens, drawn),
            torch.isfinite(best),
            torch.where(greedy, agreed(tokens, drafts, draft_count), count),
        )

    def _advance(self, row: Tensor, tokens: Tensor, verdict: Verdict) -> None:
        """Registers after the step: what was emitted is the text, its last token the next base."""
        registers, emitted = self._registers, verdict.emitted
        length = registers.length[row]
        if registers.keeps_history:  # what does not count lies behind the length, where nobody reads
            registers.history[row[:, None], length[:, None] + self._place] = tokens
        last = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None])[:, 0]
        registers.last[row] = torch.where(emitted > 0, last, registers.last[row])
        registers.length[row] = length + emitted
        registers.room[row] = torch.where(verdict.ended, 0, registers.room[row] - emitted)
