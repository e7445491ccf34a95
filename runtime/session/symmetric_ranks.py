"""Sums over the ranks of one host through memory that all its GPUs map: one kernel that reads every rank's addend."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from trtllm_replayssm.runtime.session.ranks import ProcessRanks
from trtllm_replayssm.weights.tensor_parallel import TensorParallel

ALIGNMENT = 16  # bytes that the kernel loads at once
LARGEST = 8 << 20  # bytes; a ring moves larger sums with fewer bytes a link


class SymmetricRanks(ProcessRanks):
    """As `ProcessRanks` over NCCL, but sums of up to 8 MB take one kernel instead of a ring's two phases.

    The sum is made in float32 in the order of the ranks, so that all of them get the same bits.
    """

    def __init__(self, parallel: TensorParallel) -> None:
        """After `torch.distributed.init_process_group` on the rank's own CUDA device."""
        super().__init__(parallel)
        self._group = distributed.group.WORLD
        self._buffers: dict[torch.dtype, Tensor] = {}

    def add_up(self, x: Tensor) -> Tensor:
        """See `Ranks.add_up`. The first sum of a type is a meeting of all ranks, so it must not be recorded."""
        size = x.numel() * x.element_size()
        if size > LARGEST or size % ALIGNMENT:
            return super().add_up(x)
        shared = self._buffer(x.dtype)[: x.numel()]
        shared.copy_(x.flatten())
        assert self._group is not None, "the process group exists"
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._group.group_name)
        return total.view_as(x)

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._buffers:
            from torch.distributed import _symmetric_memory as symmetric

            assert self._group is not None, "the process group exists"
            device = torch.device("cuda", torch.cuda.current_device())
            buffer = symmetric.empty(LARGEST // dtype.itemsize, dtype=dtype, device=device)
            symmetric.rendezvous(buffer, self._group.group_name)
            self._buffers[dtype] = buffer
        return self._buffers[dtype]
