"""Prompt lookup on the device: the drafts of `speculative.ngram`, token for token, over the history registers."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops import native_registers
from trtllm_replayssm.runtime.device.ports import Committed, StepPort
from trtllm_replayssm.runtime.device.registers import Registers


def lookup(history: Tensor, length: Tensor, max_ngram: int, count: int) -> tuple[Tensor, Tensor]:
    """Drafts [B, count] int64 after the first length [B] tokens of history [B, M] int64, and whether any match [B].

    The most recent earlier occurrence of the longest suffix of at most max_ngram tokens gives the continuation, which
    repeats from its start where it runs into the drafts.
    """
    place = torch.arange(history.shape[1], device=history.device)
    end = (length - 1).clamp(min=0)[:, None]
    alike = (history == history.gather(1, end)) & (place < end)
    matched = alike.long()  # tokens of the suffix that match, ending at each place
    for back in range(1, max_ngram):
        suffix = history.gather(1, (end - back).clamp(min=0))
        alike = alike & (place >= back) & (history.roll(back, 1) == suffix)
        matched += alike
    # longest first, of equals the latest
    best = torch.where(matched > 0, matched * history.shape[1] + place, -1).amax(-1)
    source = best.clamp(min=0) % history.shape[1] + 1
    period = (end[:, 0] + 1 - source).clamp(min=1)
    steps = torch.arange(count, device=history.device) % period[:, None]
    return history.gather(1, (source[:, None] + steps).clamp(max=history.shape[1] - 1)), best >= 0


class PromptLookup:
    """The drafter as a part of the step, see `ports.DraftPort`."""

    draws = False

    def __init__(
        self, max_draft_len: int, max_matching_ngram_size: int, positions: int, *, native: bool = False
    ) -> None:
        """Sizes as in `speculative.ngram.NGramDrafter`; positions: of a slot; native: by one kernel."""
        self.max_draft_len = max_draft_len
        self.positions = positions
        self._max_ngram = min(max_matching_ngram_size, positions)  # no text has a longer suffix
        self._native = native

    def propose(self, registers: Registers, row: Tensor, port: StepPort, done: Committed) -> None:
        """See `DraftPort.propose`."""
        if self._native:
            names = ("length", "room", "history", "draft", "draft_count")
            native_registers.prompt_lookup({n: getattr(registers, n) for n in names}, row, self._max_ngram)
            return
        drafts, found = lookup(registers.history[row], registers.length[row], self._max_ngram, self.max_draft_len)
        registers.draft[row] = drafts
        room = registers.draft_room(row)
        registers.draft_count[row] = torch.where(found, room.clamp(max=self.max_draft_len), 0)
