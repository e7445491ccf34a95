"""Keys and values of one attention layer: one contiguous cache per slot, rolled back by position alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.shapes import AttentionShape


@dataclass
class KvLayer:
    """keys, values: [S, Hkv, depth, D] activation dtype; only positions below a slot's `position` mean anything."""

    keys: Tensor
    values: Tensor

    @staticmethod
    def allocate(shape: AttentionShape, slots: int, depth: int, dtype: torch.dtype, device: torch.device) -> KvLayer:
        """Uninitialised caches: no position is read before it is written."""
        sizes = (slots, shape.kv_heads, depth, shape.head_dim)
        return KvLayer(torch.empty(sizes, dtype=dtype, device=device), torch.empty(sizes, dtype=dtype, device=device))

    def tensors(self) -> list[Tensor]:
        """Keys and values, slot axis first."""
        return [self.keys, self.values]
