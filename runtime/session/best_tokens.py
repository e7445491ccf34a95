"""The largest logit of each position, where every rank may hold a part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.runtime.session.ranks import Ranks


def best_tokens(logits: Tensor, vocab: int, ranks: Ranks | None) -> Tensor:
    """Ids [...] int64 of the largest of `vocab` logits, the lowest of equal ones; NaN counts as the largest.

    logits [..., V] float32: of the whole vocabulary, or of a rank's part, by the order of the ranks. Collective then:
    what the ranks exchange is one number and its place each.
    """
    if ranks is None or logits.shape[-1] == vocab:
        return logits.argmax(-1)
    value, place = logits.max(-1)
    # whole numbers below 2^24 are exact in float32
    pairs = ranks.join(torch.stack([value, place.float()], dim=-1)).unflatten(-1, (-1, 2))
    rank = pairs[..., 0].argmax(-1, keepdim=True)
    best: Tensor = pairs[..., 1].gather(-1, rank).long() + rank * logits.shape[-1]
    return best.squeeze(-1)
