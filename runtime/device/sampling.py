"""From logits to tokens on the device: argmax, and inverse-CDF draws keyed as the host's.

A drawn token is that of `sampling.distribution` and `spec.accept.draw` unless the uniform number falls within float32
noise of a boundary of the cumulative distribution: weights are computed in float32 (relative error below 2e-6 down to
e^-16 of the best), their sums in float64. Which tokens the filters keep is decided from the logits themselves for top-k
and from those weights for top-p and min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.runtime.device.entry import SamplingMode
from trtllm_replayssm.runtime.device.philox import uniform
from trtllm_replayssm.runtime.device.registers import BLOCK, SMALLEST_TEMPERATURE, Registers, whole_blocks
from trtllm_replayssm.spec.philox import Domain


@dataclass(frozen=True)
class Picked:
    """tokens [B, T] int64 and whether each one's logits are finite [B, T] bool."""

    tokens: Tensor
    finite: Tensor


def pick(logits: Tensor, registers: Registers, row: Tensor, mode: SamplingMode) -> Picked:
    """A token for each position of logits [B, T, V] float32 of register rows [B].

    Position t draws for absolute position length + t. mode: at least what the rows need.
    """
    best, tokens = logits.max(-1)  # of equals the lowest id; NaN wins
    if mode is not SamplingMode.GREEDY:
        weights = weights_of(logits, best, registers, row, mode)
        u = uniforms(registers, row, logits.shape[1], Domain.TOKEN)
        drawn = draw(weights.flatten(0, 1), u.flatten()).clamp(max=logits.shape[2] - 1).view_as(tokens)
        tokens = torch.where(registers.greedy(row)[:, None], tokens, drawn)
    return Picked(tokens, torch.isfinite(best))


def uniforms(registers: Registers, row: Tensor, width: int, domain: Domain, ahead: int = 0) -> Tensor:
    """[B, width] float64: the numbers of absolute positions from length + ahead on."""
    position = registers.length[row][:, None] + ahead + torch.arange(width, device=row.device)
    return uniform(registers.seed[row][:, None], position, domain)


def weights_of(logits: Tensor, best: Tensor, registers: Registers, row: Tensor, mode: SamplingMode) -> Tensor:
    """Logits [B, T, V] and their maxima [B, T] -> weights [B, T, V up to a block] float32 after all settings."""
    batch, width, vocab = logits.shape
    weights = scaled(logits, best, registers.temperature[row].clamp(min=SMALLEST_TEMPERATURE))
    if mode is SamplingMode.FILTERED:
        limits = (registers.top_k[row], registers.top_p[row], registers.min_p[row])
        flat = weights.view(batch * width, -1)[:, :vocab]
        keep(flat, logits.reshape(-1, vocab), *(limit.repeat_interleave(width) for limit in limits))
    return weights


def scaled(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """exp((logits - best) / temperature): [B, T, V], [B, T], [B] float32 -> weights [B, T, V up to a block] float32."""
    batch, width, vocab = logits.shape
    weights = logits.new_zeros((batch, width, whole_blocks(vocab)))
    inside = weights[..., :vocab]
    torch.sub(logits, best[..., None], out=inside)
    inside.div_(temperature[:, None, None]).exp_()
    return weights


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF in vocabulary order: weights [R, blocks of BLOCK] float32, u [R] float64 -> token [R] int64.

    The first token whose cumulative weight exceeds u times the total; one of weight 0 is never drawn. The blocks' sums
    are searched first, then one block.
    """
    blocks = weights.view(weights.shape[0], -1, BLOCK)
    upto = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (u * upto[:, -1])[:, None]
    block = (upto <= target).sum(-1, keepdim=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0]
    inner = (before + chosen.cumsum(-1, dtype=torch.float64) <= target).sum(-1)
    # rounding may leave the target at the block's very end
    last = torch.where(chosen > 0, torch.arange(BLOCK, device=u.device), 0).amax(-1)
    return block[:, 0] * BLOCK + torch.minimum(inner, last)


def keep(weights: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Zero the weights [R, V] that top-k, top-p and min-p [R] leave out, in this order; ties go to the lowest id."""
    vocab = weights.shape[1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(1, order)
    count = torch.where(top_k > 0, top_k, vocab)[:, None]
    ranked = torch.where(torch.arange(vocab, device=weights.device) < count, ranked, 0.0)
    upto = ranked.cumsum(-1, dtype=torch.float64)
    before = (upto - ranked) / upto[:, -1:]
    reached = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    low = ranked < min_p[:, None]  # the best weight is 1
    weights.scatter_(1, order, torch.where(reached | low, 0.0, ranked))
