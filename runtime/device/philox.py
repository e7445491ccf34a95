"""Philox4x32-10 in torch integers: the words of `spec.philox`, bit for bit, for many rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.spec.philox import Domain

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def signed64(seed: int) -> int:
    """The same 64 bits as a signed integer: torch has no unsigned type that multiplies."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def uniform(seed: Tensor, position: Tensor, domain: Domain) -> Tensor:
    """`spec.philox.uniform` of seeds (64 bits as int64) and absolute positions, broadcast -> float64 in [0, 1)."""
    seed, position = torch.broadcast_tensors(seed, position)
    zero = torch.zeros_like(position)
    c = [zero, zero, position & _MASK, zero + int(domain)]
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        high0, low0 = _product(c[0], _MULTIPLIERS[0])
        high1, low1 = _product(c[2], _MULTIPLIERS[1])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(k + w) & _MASK for k, w in zip(key, _WEYL, strict=True)]
    # 53 bits: exact in float64, as the host computes it
    return ((c[0] >> 5) * 67108864 + (c[1] >> 6)).double() / 9007199254740992.0


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of a 32-bit word times a 32-bit constant; the product wraps in int64 without losing a bit."""
    product = word * factor
    return (product >> 32) & _MASK, product & _MASK
