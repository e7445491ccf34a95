"""A decode or verify step of fixed shape whose inputs are tensors that stay where they are, so that it can be captured.

Rows read their position from the cursors on the device, so a step can follow another without the host in between:

    step = session.static_step(batch=64, width=4)
    forward = graphs.captured(step.forward)                          # all rows are padding: nothing moves
    step.slot.copy_(...); step.num_tokens.copy_(...); step.ids.copy_(...)
    logits = forward().logits                                        # appends records, may flush, moves no cursor
    step.commit(accepted)                                            # moves the cursors

`draft` is the drafting head in the same manner, a function of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.ops.reference.rows import check_width
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.network import Network
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.torch_graph import last_tokens
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps


@dataclass(frozen=True)
class StepModel:
    """What the steps of one session run over."""

    network: Network
    pools: StatePools
    state_ops: StateOps


class StaticStep:
    """One step of `batch` rows of up to `width` tokens.

    ids [B, T] int64: base token and drafts. slot [B] int32: -1 is padding, which touches nothing; otherwise a slot in
    use whose prompt is complete, no slot twice. num_tokens [B] int32: 0..T, tokens that exist; a row of 0 touches
    nothing either. All three are on the device of the session, all rows padding at first, and are written in place by
    whoever runs the step. Nothing is checked: `batch` must be enough for the slots (`Network.rows_for`), ids must lie
    in the vocabulary (those of tokens that do not exist as well), and position + num_tokens within max_seq_len.

    flushes: for steps in which every row is a real one with all T tokens: whether they all flush or none does, so that
    the reference operations wait for nothing either. None: any rows.
    """

    def __init__(self, model: StepModel, batch: int, width: int, *, flushes: bool | None = None) -> None:
        """Raises ContractError for a width above the pool's T_max."""
        check_width("StaticStep", model.pools.replay, width)
        self._model = model
        device = model.pools.cursors.position.device
        self.batch, self.width, self._flushes = batch, width, flushes
        self.ids = torch.zeros((batch, width), dtype=torch.int64, device=device)
        self.slot = torch.full((batch,), -1, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._last_chunk = torch.zeros(batch, dtype=torch.bool, device=device)

    def clear(self) -> None:
        """Make all rows padding."""
        self.slot.fill_(-1)
        self.num_tokens.zero_()

    def position(self) -> Tensor:
        """[B] int64: where each row's next token lies, from the cursors; 0 for padding."""
        position = self._model.pools.cursors.position[self.slot.clamp(min=0)]
        return torch.where(self.slot >= 0, position, 0).long()

    @torch.inference_mode()
    def forward(self, *, own_logits: bool = False) -> ModelOutput[Tensor]:
        """Run the rows -> logits [B, T, V] float32 and hidden [B, T, hidden] in the activation type.

        own_logits: for `best` alone: of several ranks, each may give the logits of its part of the vocabulary.
        Appends records and may flush; `commit` must follow before the rows' slots run again. Entries of tokens that
        do not exist mean nothing. No host synchronisation where the kernels serve the pools.
        """
        rows = StepRows(self.slot, self.num_tokens, self._flushes)
        ctx = StepContext(Phase.DECODE, rows, self.position(), self.width, self._last_chunk, own_logits)
        return self._model.network.forward(ctx, self.ids)

    @torch.inference_mode()
    def best(self, logits: Tensor) -> Tensor:
        """Ids [B, T] int64 of the largest of a forward pass's logits, the lowest of equal ones; on every rank alike."""
        return self._model.network.best(logits)

    @torch.inference_mode()
    def commit(self, accepted: Tensor) -> None:
        """Commit the first accepted[i] tokens of row i of the last `forward`: [B] integers, clamped to 0..num_tokens.

        slot and num_tokens must still be those of the forward pass. No host synchronisation where the kernels serve
        the pools.
        """
        self._model.state_ops.commit(StepRows(self.slot, self.num_tokens, self._flushes), accepted)

    def draft(self, num_tokens: Tensor, start: Tensor, next_ids: Tensor, hidden: Tensor) -> Drafted:
        """The function `draft` over the slots of this step: num_tokens, start [B] integers."""
        return draft(self._model, StepRows(self.slot, num_tokens.int()), start.long(), next_ids, hidden)


@dataclass(frozen=True)
class Drafted:
    """logits [B, V] float32: of each row's draft; hidden [B, 1, hidden]: what the draft after it continues from."""

    logits: Tensor
    hidden: Tensor


@torch.inference_mode()
def draft(model: StepModel, rows: StepRows, start: Tensor, next_ids: Tensor, hidden: Tensor) -> Drafted:
    """Run the multi-token-prediction head over pairs (token at start + i + 1, hidden state of position start + i).

    rows: num_tokens pairs of each slot, at most T of them; slot -1 or no pairs: nothing is touched, the result means
    nothing. start [B] int64. next_ids [B, T] int64. hidden [B, T, hidden] activation type: the committed tokens' of a
    forward pass, or for one pair a row (T = 1) the `hidden` of the last call, with start advanced by its num_tokens.
    No host synchronisation for T <= T_max where the kernels serve the pools.
    """
    width = next_ids.shape[1]
    phase = Phase.DRAFT if width <= model.pools.replay.max_step_tokens else Phase.PREFILL
    every = torch.ones(len(next_ids), dtype=torch.bool, device=next_ids.device)
    ctx = StepContext(phase, rows, start, width, every)
    output = model.network.mtp_forward(ctx, next_ids, hidden)
    return Drafted(output.logits[:, 0], last_tokens(output.hidden, ctx))
