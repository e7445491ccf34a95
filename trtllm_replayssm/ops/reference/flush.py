"""Folding committed records into the checkpoint and storing both copies from the same float32 state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.reference.decay_skip import DecaySkip
from trtllm_replayssm.ops.reference.philox import state_words
from trtllm_replayssm.ops.reference.window import ring_index


def store_checkpoints(
    state: ReplayLayerState, cursors: CursorTensors, slot: Tensor, folded: Tensor, position: Tensor
) -> None:
    """Store float32 states [A, H, P, N]; position [A]: tokens they have absorbed, which keys stochastic rounding."""
    config, words = state.config, None
    if config.recurrence is not StateFormat.FLOAT32 and config.recurrence_rounding is Rounding.STOCHASTIC:
        elems = state.shape.head_dim * state.shape.state_dim
        words = state_words(
            cursors.seed[slot], state.layer, state.shape.heads, elems, position, first_head=state.shape.first_head
        )
    state.checkpoint.store(slot, folded, config.recurrence_rounding, words)
    if state.read_copy is not None:
        state.read_copy.store(slot, folded, Rounding.NEAREST)


class StepStart(NamedTuple):
    """What a step knows of its A active rows before it runs.

    slot, num_tokens, h (committed records): [A] int64; folding: [F] int64, those of the A rows that fold; source:
    [A, H, P, N] float32, the checkpoint each row reads; ring_rows: [A, C] int64, from the oldest committed record on.
    """

    slot: Tensor
    num_tokens: Tensor
    h: Tensor
    folding: Tensor
    source: Tensor
    ring_rows: Tensor


def begin_step(
    state: ReplayLayerState, cursors: CursorTensors, rows: StepRows, skip: DecaySkip | None = None
) -> StepStart:
    """Apply the flush rule to the active rows and load what they read; nothing (zeros) for heads that have faded."""
    slot, count = rows.active_slot, rows.active_num_tokens
    h = cursors.h[slot].long()
    flush = h + count > state.config.window
    folding = as_rows(flush) if rows.flushes is None else torch.arange(len(slot) * rows.flushes, device=slot.device)
    index, source = ring_index(state, cursors, slot), load_for_step(state, slot, folding)
    if skip is not None:
        source = source.masked_fill(skip.faded(state, slot, index, h, flush)[..., None, None], 0.0)
    return StepStart(slot, count, h, folding, source, index)


def load_for_step(state: ReplayLayerState, slot: Tensor, folding: Tensor) -> Tensor:
    """The checkpoint each row reads, [A, H, P, N] float32: high precision where it folds, else the read copy."""
    if state.read_copy is None or len(folding) == len(slot):
        return state.checkpoint.load(slot)
    loaded = state.read_copy.load(slot)
    if len(folding):
        loaded[folding] = state.checkpoint.load(slot[folding])
    return loaded


def live_rows(rows: StepRows, token: int) -> Tensor:
    """Indices of the A active rows that have this token of the step."""
    if rows.flushes is not None:
        return torch.arange(len(rows.active), device=rows.slot.device)
    return as_rows(rows.active_num_tokens > token)


def as_rows(mask: Tensor) -> Tensor:
    """Indices of the true entries of a mask [A]."""
    return torch.nonzero(mask).flatten()
