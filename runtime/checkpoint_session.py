"""The torch session of a checkpoint: on one device, or on several that share the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.config import RANK_TIMEOUT, CudaGraphConfig, PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.checkpoint import Checkpoint

if TYPE_CHECKING:  # torch is imported when a session is made, not before
    from trtllm_replayssm.runtime.session.rank_process import MakeSession
    from trtllm_replayssm.runtime.session.ranks import Ranks


def checkpoint_session(
    checkpoint: Checkpoint, replay: ReplayConfig, pool: PoolConfig, *, state_cache: str, device: str,
    cuda_graphs: CudaGraphConfig | None, debug: bool, ranks: int = 1, rank_timeout: float = RANK_TIMEOUT,
) -> Session:  # fmt: skip
    """ranks: devices that share the model, each in a process of its own: "cuda" stands for cuda:0, cuda:1, ...;
    rank_timeout: see `shared_session`.

    Raises ConfigError for more ranks than GPUs, and for a model that they cannot share evenly.
    """
    from trtllm_replayssm.runtime.session.torch_session import TorchSession

    if ranks == 1:
        return TorchSession.from_checkpoint(
            checkpoint, replay, pool, state_cache=state_cache, device=device, debug=debug, cuda_graphs=cuda_graphs
        )
    require_devices(device, ranks)
    make = partial(
        rank_session, checkpoint.directory, replay, pool, state_cache=state_cache, device=device, debug=debug,
        cuda_graphs=cuda_graphs,
    )  # fmt: skip
    return shared_session(make, ranks, device, checkpoint.geometry, rank_timeout)


def shared_session(
    make: MakeSession, ranks: int, device: str, geometry: ModelGeometry, rank_timeout: float = RANK_TIMEOUT
) -> Session:
    """A session over processes, one a rank, each with the session that `make` makes there; geometry: the whole model's.

    rank_timeout: seconds in which no rank gets further, after which a call fails and names the one that is behind.
    Raises ConfigError with what a rank met while it started.
    """
    from trtllm_replayssm.runtime.session.rank_process import start_ranks
    from trtllm_replayssm.runtime.session.shared_session import SharedSession

    own, others = start_ranks(ranks, make, backend="gloo" if device == "cpu" else "nccl", limit=rank_timeout)
    return SharedSession(
        own, others.connections, geometry, others.hang_up, others.give_up, marks=others.marks, limit=rank_timeout,
        check=others.own.require_sums,
    )  # fmt: skip


def rank_session(
    directory: Path, replay: ReplayConfig, pool: PoolConfig, ranks: Ranks, *, state_cache: str, device: str,
    cuda_graphs: CudaGraphConfig | None, debug: bool,
) -> Session:  # fmt: skip
    """One rank's session, in its own process."""
    from trtllm_replayssm.runtime.session.torch_session import TorchSession

    return TorchSession.from_checkpoint(
        Checkpoint.open(directory), replay, pool, state_cache=state_cache, device=rank_device(device, ranks),
        debug=debug, cuda_graphs=cuda_graphs, ranks=ranks,
    )  # fmt: skip


def rank_device(device: str, ranks: Ranks) -> str:
    """The device of one rank, the process's current one from now on."""
    if device == "cpu":
        return device
    import torch

    name = f"cuda:{ranks.parallel.rank}"
    torch.cuda.set_device(name)
    return name


def require_devices(device: str, ranks: int) -> None:
    """Raise ConfigError where `device` does not stand for as many GPUs as there are ranks."""
    if device == "cpu":
        return
    import torch

    found = torch.cuda.device_count()
    if device != "cuda" or found < ranks:
        raise ConfigError(
            "LLM", "tensor_parallel_size", expected=f"at most {found} GPUs, and device cuda without a number",
            got=f"{ranks} on {device}",
        )  # fmt: skip
