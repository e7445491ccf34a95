"""The largest logit of each position, where every rank may hold a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops import native_draw
from trtllm_replayssm.runtime.session.ranks import Ranks


def best_tokens(logits: Tensor, vocab: int, ranks: Ranks | None) -> Tensor:
    """Ids [B, T] int64 of the largest of `vocab` logits, the lowest of equal ones; NaN counts as the largest.

    logits [B, T, V] float32: of the whole vocabulary, or of a rank's part, by the order of the ranks. Collective then:
    what the ranks exchange is one number and its place each.
    """
    place = native_draw.likeliest(logits)
    if ranks is None or logits.shape[-1] == vocab:
        return place
    value = logits.gather(-1, place[..., None])
    # whole numbers below 2^24 are exact in float32
    pairs = ranks.join(torch.cat([value, place[..., None].float()], dim=-1)).unflatten(-1, (-1, 2))
    rank = pairs[..., 0].argmax(-1, keepdim=True)
    best: Tensor = pairs[..., 1].gather(-1, rank).long() + rank * logits.shape[-1]
    return best.squeeze(-1)
