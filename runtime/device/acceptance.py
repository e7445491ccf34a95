"""Which of a step's tokens count: drafts that agree, cut where the request ends. One-hot drafts (n-gram, argmax)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.runtime.device.registers import Registers


@dataclass(frozen=True)
class Verdict:
    """emitted [B] int64: tokens that count, which is also how many of the row to commit. ended [B] bool: for good."""

    emitted: Tensor
    ended: Tensor


def agreed(tokens: Tensor, draft: Tensor, draft_count: Tensor) -> Tensor:
    """Tokens drawn [B, T], drafts [B, T - 1] of which the first draft_count [B] exist -> tokens that count [B].

    The drafts up to the first that was not drawn, and one token more.
    """
    exists = torch.arange(draft.shape[1], device=tokens.device) < draft_count[:, None]
    same = (tokens[:, :-1] == draft) & exists
    return 1 + same.long().cumprod(-1).sum(-1)


def cut(tokens: Tensor, count: Tensor, alive: Tensor, broken: Tensor, registers: Registers, row: Tensor) -> Verdict:
    """The first `count` [B] of tokens [B, T], cut behind the first stop token and at the length limit.

    Rows that are not alive [B] emit nothing; nor do broken ones [B], which end.
    """
    width = tokens.shape[1]
    stops = (tokens[:, :, None] == registers.stop_ids[row][:, None, :]).any(-1)
    place = torch.arange(1, width + 1, device=tokens.device)
    through = torch.where(stops, place, width + 1).amin(-1)  # tokens through the first stop
    room = registers.room[row]
    emitted = torch.minimum(torch.minimum(count, through), room)
    emitted = torch.where(alive & ~broken, emitted, 0)
    ended = broken | (through <= emitted) | (room <= emitted)
    return Verdict(emitted, ended)
