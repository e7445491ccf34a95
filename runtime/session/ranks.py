"""The sums and joins that tensor-parallel ranks need within a forward pass."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from trtllm_replayssm.errors import DeviceError, UnsupportedError
from trtllm_replayssm.ops.native_ranks import Inboxes
from trtllm_replayssm.runtime.session.rank_inboxes import open_inboxes
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.tensor_parallel import TensorParallel, partial_results

# torch 2.13 warns of the name that 2.11 has alone
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
UNWATCHED_PATIENCE = 3600.0  # seconds that a rank which nobody watches waits for another one in the sums' kernel


class Ranks(Protocol):
    """Collectives of the ranks that share a model; each rank calls them in the same order."""

    parallel: TensorParallel

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in x's type; x may be overwritten."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """[..., C] of every rank -> [..., size * C], rank after rank."""
        ...

    def inboxes(self, rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Inboxes | None:
        """Memory through which the kernel adds up at most so many rows; None where only `add_up` can. Collective."""
        ...

    def communicator(self) -> Any:
        """The NCCL communicator as a Python capsule, for a library that calls NCCL itself."""
        ...


@dataclass(frozen=True)
class Sharing:
    """How a forward pass runs on one of several ranks.

    partial: names of the matrices whose results add up over the ranks. vocab: rows of the whole output head. inboxes:
    of the ranks, for rows of the hidden size, where a kernel adds them up.
    """

    ranks: Ranks
    partial: frozenset[str]
    vocab: int
    inboxes: Inboxes | None = None

    @staticmethod
    def of(geometry: ModelGeometry, ranks: Ranks, inboxes: Inboxes | None = None) -> Sharing:
        """For a model's geometry, the whole one or a rank's."""
        return Sharing(ranks, partial_results(geometry), geometry.vocab, inboxes)

    def own_rows(self, table: Tensor) -> Tensor:
        """This rank's rows of the output head; one that is the embedding table as well is held whole by all ranks."""
        if len(table) < self.vocab:
            return table
        own = self.ranks.parallel.units(self.vocab)
        return table[own.start : own.stop]

    def own_experts(self, ids: Tensor, experts: int) -> Tensor:
        """Chosen experts [n, top_k] of all -> counted from this rank's first; -1 for those of other ranks."""
        own = self.ranks.parallel.units(experts)
        return torch.where((ids >= own.start) & (ids < own.stop), ids - own.start, -1)


class ProcessRanks:
    """Ranks in processes of their own: NCCL on GPUs, where a CUDA graph can record the calls, gloo on a CPU.

    Raises what torch.distributed raises when a rank is gone.
    """

    def __init__(self, parallel: TensorParallel, patience: float = UNWATCHED_PATIENCE) -> None:
        """Its collectives come after `torch.distributed.init_process_group`. patience: seconds that a sum by the kernel
        waits for another rank by itself.
        """
        self.parallel, self.patience = parallel, patience
        self._gave_up: Tensor | None = None  # shared by all inboxes

    def add_up(self, x: Tensor) -> Tensor:
        """See `Ranks.add_up`."""
        x = x.contiguous()
        distributed.all_reduce(x)
        return x

    def join(self, x: Tensor) -> Tensor:
        """See `Ranks.join`."""
        x = x.contiguous()
        parts = torch.empty((self.parallel.size, *x.shape), dtype=x.dtype, device=x.device)
        _gather(parts.flatten(0, 1), x)
        return parts.movedim(0, -2).flatten(-2)

    def inboxes(self, rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Inboxes | None:
        """See `Ranks.inboxes`: on GPUs of one host that reach each other's memory."""
        if device.type != "cuda" or distributed.get_backend() != "nccl":
            return None
        if self._gave_up is None:
            self._gave_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        return open_inboxes(self.parallel, rows, channels, dtype, device, self._gave_up, self.patience)

    def give_up(self) -> None:
        """Wait for no other rank any more, from any thread: sums over ranks that are under way become NaN."""
        if self._gave_up is not None:
            self._gave_up.fill_(1)

    def require_sums(self) -> None:
        """Raise DeviceError once a sum over ranks was given up: what was computed since means nothing."""
        if self._gave_up is not None and self._gave_up.item():
            raise DeviceError(
                "sum over ranks", f"rank {self.parallel.rank}", expected="words of every rank", got="none in time",
                hint="Restart the replica",
            )  # fmt: skip

    def communicator(self) -> Any:
        """See `Ranks.communicator`. Raises UnsupportedError where the ranks do not speak NCCL."""
        if distributed.get_backend() != "nccl":
            raise UnsupportedError(
                "load bundle", "ranks", expected="NCCL, which the engines call", got=distributed.get_backend(),
                hint="Engines of tensorrt share a model among GPUs only",
            )  # fmt: skip
        device = torch.device("cuda", torch.cuda.current_device())
        distributed.all_reduce(torch.zeros(1, device=device))  # the communicator exists from the first call on
        pointer = distributed.group.WORLD._get_backend(device)._comm_ptr()  # type: ignore[union-attr]
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(pointer, None, None)
