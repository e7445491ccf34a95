"""A checkpoint's parameters as torch tensors: dense ones converted once, experts one at a time on demand or, for the
native kernels, packed as they are stored.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from trtllm_replayssm.ops.native_experts import ExpertStacks, PackedStack
from trtllm_replayssm.runtime.session.expert_stacks import stack
from trtllm_replayssm.runtime.session.ranks import Ranks
from trtllm_replayssm.weights.shard import WeightSource

DEFAULT_EXPERT_CACHE_BYTES = 1 << 30


class TorchWeights:
    """Parameters by canonical name.

    dtype: type of matrices; vectors, convolutions and routers are float32. A quantised matrix is decoded to float32
    exactly as its bytes say and then converted. Decoded experts are kept in a cache of `expert_cache_bytes`, the
    least recently used dropped first, so that a large expert stack is never wholly in memory.
    """

    def __init__(
        self, checkpoint: WeightSource, dtype: torch.dtype, device: torch.device,
        expert_cache_bytes: int = DEFAULT_EXPERT_CACHE_BYTES, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """ranks: `checkpoint` is the share of one of them."""
        self.ranks = ranks
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._dense: dict[str, Tensor] = {}
        self._stacks: dict[str, ExpertStacks] = {}
        self._experts: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self._expert_cache_bytes = expert_cache_bytes
        self._expert_bytes = 0

    def matrix(self, name: str) -> Tensor:
        """[out, in] in the activation type."""
        if name not in self._dense:
            self._dense[name] = self._convert(self._checkpoint.matrix(name).dequantize(np.float32)).to(self._dtype)
        return self._dense[name]

    def matrix_float32(self, name: str) -> Tensor:
        """[out, in] float32: routers, whose near ties must not move."""
        key = f"{name} float32"
        if key not in self._dense:
            self._dense[key] = self._convert(self._checkpoint.matrix(name).dequantize(np.float32))
        return self._dense[key]

    def vector(self, name: str) -> Tensor:
        """Vectors and convolution weights, float32."""
        if name not in self._dense:
            self._dense[name] = self._convert(self._checkpoint.vector(name))
        return self._dense[name]

    def expert(self, name: str, expert: int) -> Tensor:
        """One expert's [out, in] of the stack `name`, in the activation type."""
        key = (name, expert)
        if key in self._experts:
            self._experts.move_to_end(key)
            return self._experts[key]
        matrix = self._checkpoint.experts(name).matrix(expert)
        weight = self._convert(matrix.dequantize(np.float32)).to(self._dtype)
        self._experts[key] = weight
        self._expert_bytes += weight.numel() * weight.element_size()
        while self._expert_bytes > self._expert_cache_bytes and len(self._experts) > 1:
            _, oldest = self._experts.popitem(last=False)
            self._expert_bytes -= oldest.numel() * oldest.element_size()
        return weight

    def expert_stacks(self, prefix: str, *, gated: bool) -> ExpertStacks:
        """All experts of `prefix` in the order of the native kernels, packed at the first call and then kept."""
        if prefix not in self._stacks:
            up = ("gate_proj", "up_proj") if gated else ("up_proj",)
            self._stacks[prefix] = ExpertStacks(up=self._packed(prefix, up), down=self._packed(prefix, ("down_proj",)))
        return self._stacks[prefix]

    def _packed(self, prefix: str, projections: tuple[str, ...]) -> PackedStack:
        parts = [self._checkpoint.experts(f"{prefix}.{projection}") for projection in projections]
        return stack(zip(*(map(p.matrix, range(len(p))) for p in parts), strict=True), len(parts[0]), self._device)

    def _convert(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array, dtype=np.float32)).to(self._device)
