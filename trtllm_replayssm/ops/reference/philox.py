"""Random words of stochastic rounding as tensors: the same bits as `spec.philox.state_words`, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.spec.philox import MULTIPLIERS, WEYL, Domain

_MASK = 0xFFFFFFFF


def state_words(
    seed: Tensor, layer: int | Tensor, heads: int, elems: int, position: Tensor, *, first_head: int = 0
) -> Tensor:  # fmt: skip
    """Words [B, heads, elems] int64 below 2^32: seed [B] int64 keys of rows, position [B] tokens they have absorbed.

    layer: of all rows, or [B]. first_head: of the model's heads.
    """
    quads = torch.arange(-(-elems // 4), device=seed.device)
    above = layer << 16
    head = torch.arange(first_head, first_head + heads, device=seed.device)
    head = head | (above[:, None] if isinstance(above, Tensor) else above)
    shape = (len(seed), heads, len(quads))
    row = [value.long()[:, None, None] for value in (seed, position)]
    c = [
        quads.expand(shape), head[..., None].expand(shape), (row[1] & _MASK).expand(shape),
        torch.full(shape, int(Domain.STATE), dtype=torch.int64, device=seed.device),
    ]  # fmt: skip
    key = [row[0] & _MASK, (row[0] >> 32) & _MASK]
    for _ in range(10):
        # a product's 64 bits are exact in a wrapping int64; its shift is arithmetic, hence the masks
        first, second = c[0] * MULTIPLIERS[0], c[2] * MULTIPLIERS[1]
        c = [
            ((second >> 32) & _MASK) ^ c[1] ^ key[0],
            second & _MASK,
            ((first >> 32) & _MASK) ^ c[3] ^ key[1],
            first & _MASK,
        ]
        key = [(k + w) & _MASK for k, w in zip(key, WEYL, strict=True)]
    return torch.stack(c, dim=-1).flatten(-2)[..., :elems]
