"""State pools of small geometries, filled with recognisable bytes."""

from __future__ import annotations

from pathlib import Path

import torch

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.weights.hf_config import parse_config

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
GEOMETRIES = ("nemotron-dense", "qwen-moe")
TWO_PRECISIONS = ReplayConfig(window=4, max_step_tokens=3, recurrence=StateFormat.FP8, read=StateFormat.NVFP4)


def state_pools(
    name: str = "qwen-moe", replay: ReplayConfig = TWO_PRECISIONS, *, slots: int = 3, max_seq_len: int = 32,
    activation: ActivationDtype = ActivationDtype.FLOAT32, conventional: bool = False,
) -> StatePools:  # fmt: skip
    geometry = parse_config(CHECKPOINTS / name)
    pool = PoolConfig(slots=slots, max_seq_len=max_seq_len, activation=activation)
    return StatePools.allocate(geometry, replay, pool, conventional=conventional, device=torch.device("cpu"))


def everything(pools: StatePools) -> list[torch.Tensor]:
    """Every pool tensor except the cursors, slot axis first."""
    states = [t for state in pools.ssm.values() for t in state.tensors()]
    return [*states, *pools.windows.values(), *(t for kv in pools.kv.values() for t in kv.tensors())]


def scribble(
    pools: StatePools, slot: int, value: int = 0x3C, *, position: int = 9, h: int = 2, origin: int = 5
) -> None:
    """The slot's every byte, as a used slot might be: cursors in range."""
    for tensor in everything(pools):
        tensor[slot].view(torch.uint8).fill_(value)
    pools.cursors.position[slot], pools.cursors.h[slot], pools.cursors.origin[slot] = position, h, origin


def contents(pools: StatePools, slot: int) -> list[torch.Tensor]:
    """Copies of the slot's bytes, cursors included."""
    tensors = [*everything(pools), *pools.cursors.tensors()]
    return [t[slot].contiguous().flatten().clone().view(torch.uint8) for t in tensors]
