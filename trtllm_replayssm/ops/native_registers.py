"""The native inputs and outcome of a decode step over per-slot registers, see plugins/include/replayssm/registers.h."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops import torch_ops

__all__ = ["prompt_lookup", "step_inputs", "step_outcome", "torch_ops"]


def step_inputs(registers: dict[str, Tensor], slot: Tensor, ids: Tensor, num_tokens: Tensor, row: Tensor) -> None:
    """Write ids [B, T] int64, num_tokens [B] int32 and row [B] int64 for slots [B] int32.

    registers: last, room, draft_count [S + 1], draft [S + 1, D], int64. Nothing waits for the device.
    """
    torch.ops.replayssm.step_inputs(flags=0, slot=slot, **registers, ids=ids, num_tokens=num_tokens, row=row)


def step_outcome(
    registers: dict[str, Tensor | None], slot: Tensor, num_tokens: Tensor, tokens: Tensor, finite: Tensor,
    count: Tensor | None, emitted: Tensor, report: Tensor,
) -> None:  # fmt: skip
    """Write emitted [B] int32, report [B, T + 3] int64 and the registers after tokens [B, T] int64.

    registers: last, length, room [S + 1], draft [S + 1, D], stop_ids [S + 1, K], history [S + 1, M] or None, int64.
    finite [B, T] int32; count [B] int64, None: the drafts that agree, and one. Nothing waits for the device.
    """
    torch.ops.replayssm.step_outcome(
        flags=0, slot=slot, num_tokens=num_tokens, tokens=tokens, finite=finite, count=count, **registers,
        emitted=emitted, report=report,
    )  # fmt: skip


def prompt_lookup(registers: dict[str, Tensor], row: Tensor, max_ngram: int) -> None:
    """Write draft and draft_count of register rows [B] int64.

    registers: length, room, draft_count [S + 1], history [S + 1, M], draft [S + 1, D], int64. Nothing waits for the
    device.
    """
    torch.ops.replayssm.prompt_lookup(flags=0, max_ngram=max_ngram, row=row, **registers)
