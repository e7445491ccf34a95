"""Inboxes for the sums over the ranks of a process group: memory of each GPU that the other ranks' processes map."""

from __future__ import annotations

import logging
import socket

import torch
from torch import Tensor, distributed

from trtllm_replayssm.ops.native_ranks import MARK, Inboxes
from trtllm_replayssm.weights.tensor_parallel import TensorParallel

MOST_BYTES = 64 << 20  # of a rank's inbox; sums of more rows go through the process group
_LOG = logging.getLogger(__name__)


def open_inboxes(
    parallel: TensorParallel, rows: int, channels: int, dtype: torch.dtype, device: torch.device, gave_up: Tensor,
    patience: float,
) -> Inboxes | None:  # fmt: skip
    """Collective, over NCCL: for sums of up to `rows` rows, fewer where their inboxes would be larger than MOST_BYTES.

    gave_up, patience: see `Inboxes`. None on every rank, with a warning that says why, where one of them cannot map
    another's memory.
    """
    from torch.distributed import _symmetric_memory  # long to import, and only here

    if not Inboxes.can_serve(parallel.size, channels, dtype):
        return None
    rows = min(rows, MOST_BYTES // (2 * parallel.size * channels * dtype.itemsize))
    obstacle = _obstacle(parallel, device)
    if _any(obstacle is not None, device):
        _LOG.warning("sums over ranks go through NCCL: %s", obstacle or "another rank cannot map memory")
        return None
    own = _symmetric_memory.empty((2, parallel.size, rows, channels), dtype=dtype, device=device)
    mapping = _symmetric_memory.rendezvous(own, _world())
    own.fill_(MARK)
    turn = torch.zeros(rows, dtype=torch.int32, device=device)
    addresses = tuple(int(pointer) for pointer in mapping.buffer_ptrs)
    _any(False, device)  # nobody pushes before every inbox is filled
    return Inboxes(parallel.rank, own, addresses, turn, gave_up, patience, mapping)


def _world() -> distributed.ProcessGroup:
    group = distributed.group.WORLD
    assert group is not None, "after init_process_group"
    return group


def _obstacle(parallel: TensorParallel, device: torch.device) -> str | None:
    """Why this rank cannot map the others' memory, or None. Collective."""
    places: list[tuple[str, int] | None] = [None] * parallel.size
    distributed.all_gather_object(places, (socket.gethostname(), device.index))
    for rank, place in enumerate(places):
        assert place is not None
        host, index = place
        if host != socket.gethostname():
            return f"rank {rank} is on another host"
        if rank != parallel.rank and not torch.cuda.can_device_access_peer(device, index):
            return f"{device} has no access to the memory of rank {rank}"
    return None


def _any(here: bool, device: torch.device) -> bool:
    """Whether it is so on any rank; every rank has come here, and its device too."""
    met = torch.tensor([here], dtype=torch.int32, device=device)
    distributed.all_reduce(met, distributed.ReduceOp.MAX)
    return bool(met.item())
