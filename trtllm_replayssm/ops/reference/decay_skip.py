"""Which heads of a step have forgotten their checkpoint and do without it (paper, Appendix F; `spec.decay_skip`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import ReplayLayerState
from trtllm_replayssm.ops.reference.window import load_ring


class DecaySkip(NamedTuple):
    """The rule for the A active rows of one step.

    skip_below: a head has faded when its cumulative decay is at most this; first: [A, H] float32, log-decay of each
    row's first token; rate: [H] what a ring entry is multiplied by (Mamba-2, whose ring keeps dt), None: entries are
    log-decays.
    """

    skip_below: float
    first: Tensor
    rate: Tensor | None

    def faded(self, state: ReplayLayerState, slot: Tensor, index: Tensor, h: Tensor, flush: Tensor) -> Tensor:
        """[A, H] bool, from the committed records of the rows; the first token counts in steps that do not flush.

        The sum is float32: its rounding moves the threshold by at most (h + 1) 2^-24 |log skip_below|, relatively.
        """
        decays = load_ring(state.ring_decay, slot, index, h)
        if self.rate is not None:
            # an infinite rate times the zeros outside the committed range would be NaN
            decays = torch.where(decays > 0, decays * self.rate[:, None], torch.zeros((), device=decays.device))
        total = decays.sum(-1) + torch.where(flush[:, None], torch.zeros_like(self.first), self.first)
        return total <= math.log(self.skip_below)
