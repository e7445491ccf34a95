"""Moving the cursors: commit after a step, and the reset at the end of a prompt chunk. One call for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops.layer_state import CursorTensors, StepRows


def commit(config: ReplayConfig, cursors: CursorTensors, rows: StepRows, accepted: Tensor) -> None:
    """accepted [B], clamped to 0..num_tokens (paper, Appendix D.1). A window the step has folded is dropped first."""
    slot, count = rows.active_slot, rows.active_num_tokens
    taken = torch.minimum(accepted.to(count.device).long()[rows.active].clamp(min=0), count)
    origin, h = cursors.origin[slot].long(), cursors.h[slot].long()
    flushed = h + count > config.window
    origin = torch.where(flushed, (origin + h) % config.ring_rows, origin)
    h = torch.where(flushed, torch.zeros_like(h), h) + taken
    cursors.origin[slot] = origin.int()
    cursors.h[slot] = h.int()
    cursors.position[slot] += taken.int()


def commit_conventional(config: ReplayConfig, cursors: CursorTensors, rows: StepRows, accepted: Tensor) -> None:
    """The baseline's commit: `origin` moves to the snapshot of the last accepted token."""
    taken = torch.minimum(accepted.to(rows.slot.device).clamp(min=0), rows.num_tokens)
    taken = torch.where(rows.slot >= 0, taken, 0).int()
    slot = rows.slot.clamp(min=0)  # padding adds nothing to slot 0
    cursors.position.index_add_(0, slot, taken)
    cursors.origin.index_add_(0, slot, taken)
    cursors.origin.remainder_(config.max_step_tokens + 1)


def finish_chunk(cursors: CursorTensors, slot: Tensor, num_tokens: Tensor) -> None:
    """After a prompt chunk has left its state in the checkpoint: origin = h = 0, position += n."""
    cursors.origin[slot] = 0
    cursors.h[slot] = 0
    cursors.position[slot] += num_tokens.int()
