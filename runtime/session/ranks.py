"""The sums and joins that tensor-parallel ranks need within a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, distributed

from trtllm_replayssm.weights.tensor_parallel import TensorParallel


class Ranks(Protocol):
    """Collectives of the ranks that share a model; each rank calls them in the same order."""

    parallel: TensorParallel

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in x's type; x may be overwritten."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """[..., C] of every rank -> [..., size * C], rank after rank."""
        ...


@dataclass(frozen=True)
class Sharing:
    """How a forward pass runs on one of several ranks. partial: names of the matrices whose results add up."""

    ranks: Ranks
    partial: frozenset[str]

    def whole(self, result: Tensor, weight: str) -> Tensor:
        """What a matrix gives: added up over the ranks where each holds some of its inputs."""
        return self.ranks.add_up(result) if weight in self.partial else result

    def own_rows(self, table: Tensor) -> Tensor:
        """This rank's rows of an output head that all ranks hold, because it is the embedding table as well."""
        own = self.ranks.parallel.units(len(table))
        return table[own.start : own.stop]


class ProcessRanks:
    """Ranks in processes of their own: NCCL on GPUs, where a CUDA graph can record the calls, gloo on a CPU.

    Raises what torch.distributed raises when a rank is gone.
    """

    def __init__(self, parallel: TensorParallel) -> None:
        """After `torch.distributed.init_process_group`."""
        self.parallel = parallel

    def add_up(self, x: Tensor) -> Tensor:
        """See `Ranks.add_up`."""
        x = x.contiguous()
        distributed.all_reduce(x)
        return x

    def join(self, x: Tensor) -> Tensor:
        """See `Ranks.join`."""
        x = x.contiguous()
        parts = torch.empty((self.parallel.size * x.numel(),), dtype=x.dtype, device=x.device)
        distributed.all_gather_into_tensor(parts, x.flatten())
        return parts.view(self.parallel.size, *x.shape).movedim(0, -2).flatten(-2)
