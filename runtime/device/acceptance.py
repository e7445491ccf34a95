"""Which of a step's tokens count: drafts that agree or are accepted, cut where the request ends.

One-hot drafts (n-gram, argmax) are held against what is drawn; drafts that were drawn from q pass the general rule of
`spec.accept.accept_general`, within float32 noise of its decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.device.sampling import draw, uniforms
from trtllm_replayssm.spec.philox import Domain


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


def accept_drawn(
    weights: Tensor, draft: Tensor, draft_count: Tensor, registers: Registers, row: Tensor
) -> tuple[Tensor, Tensor]:
    """Which drafts pass, and the token behind them: weights [B, T, V up to a block] of p, drafts [B, T - 1] drawn from
    the q of the registers, of which the first draft_count [B] exist -> tokens [B, T], and how many count [B].

    Accept d iff u q(d) < p(d); else draw from the normalised (p - q)+, or from p where that is empty.
    """
    drafts = draft.shape[1]
    total = weights.sum(-1, dtype=torch.float64)
    q = registers.draft_weights[row][:, :drafts]
    wanted = weights[:, :drafts].gather(2, draft[..., None])[..., 0] / total[:, :drafts]
    offered = q.gather(2, draft[..., None])[..., 0]
    passes = uniforms(registers, row, drafts, Domain.ACCEPT) * offered < wanted
    exists = torch.arange(drafts, device=row.device) < draft_count[:, None]
    accepted = (passes & exists).long().cumprod(-1).sum(-1, keepdim=True)  # [B, 1]
    behind = accepted[..., None].expand(-1, 1, weights.shape[-1])
    p = (weights.gather(1, behind)[:, 0] / total.gather(1, accepted)).float()
    rejected = accepted < draft_count[:, None]
    residual = (p - q.gather(1, behind.clamp(max=drafts - 1))[:, 0]).clamp(min=0)
    p = torch.where(rejected & residual.any(-1, keepdim=True), residual, p)
    instead, behind_all = (uniforms(registers, row, drafts + 1, domain) for domain in (Domain.RESIDUAL, Domain.TOKEN))
    u = torch.where(rejected, instead, behind_all).gather(1, accepted)
    token = draw(p, u[:, 0])[:, None]
    place = torch.arange(drafts + 1, device=row.device)
    padded = torch.cat([draft, draft[:, :1]], 1)
    return torch.where(place < accepted, padded, token), 1 + accepted[:, 0]


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
