"""The model that steps run over: a checkpoint's parameters, or random ones of a public geometry, and its sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trtllm_replayssm.bench.step.cases import StepCase
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.random_weights import RandomWeights
from trtllm_replayssm.runtime.session.ranks import Ranks
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.presets import preset_geometry, slice_geometry
from trtllm_replayssm.weights.tensor_parallel import shard_geometry

ALL = "all"
SLICE_VOCAB = 4096  # of a slice: it counts its own layers, so its embedding and output head shall cost nothing


@dataclass(frozen=True)
class StepModel:
    """geometry: without a drafting head. layers: those of the public model, or "all". format_of: of each matrix."""

    geometry: ModelGeometry
    layers: str
    weights: TorchWeights
    format_of: Callable[[str], MatrixFormat]
    activation: ActivationDtype
    device: torch.device

    def session(self, case: StepCase, slots: int, max_seq_len: int) -> TorchSession:
        """A session with pools for the case's cache."""
        pool = PoolConfig(slots=slots, max_seq_len=max_seq_len, activation=self.activation)
        pools = StatePools.allocate(
            self.geometry, case.replay, pool, conventional=case.conventional, device=self.device
        )
        return TorchSession(self.weights, pools)


def step_model(
    model: str, layers: tuple[int, int] | None, activation: ActivationDtype, device: torch.device, *,
    ranks: Ranks | None = None,
) -> StepModel:  # fmt: skip
    """A checkpoint directory, or a preset with random parameters, of which some layers may be taken.

    ranks: the preset's share of one of them. Raises ConfigError and CheckpointError.
    """
    dtype = torch_dtype(activation)
    if Path(model).is_dir():
        if layers is not None:
            raise ConfigError("bench step", "layers", expected="a preset beside it", got="a checkpoint")
        checkpoint = Checkpoint.open(Path(model))
        geometry = slice_geometry(checkpoint.geometry, None, mtp=False)
        return StepModel(
            geometry, ALL, TorchWeights(checkpoint, dtype, device), lambda name: checkpoint.storage(name)[0].format,
            activation, device,
        )  # fmt: skip
    geometry = slice_geometry(preset_geometry(model), layers, mtp=False, operation="bench step")
    if layers is not None:
        geometry = replace(geometry, vocab=SLICE_VOCAB)
    if ranks is not None:
        geometry = shard_geometry(geometry, ranks.parallel)
    first = 0 if layers is None else layers[0]
    weights = RandomWeights(geometry, dtype, device, first_layer=first, seed=0, ranks=ranks)
    named = ALL if layers is None else f"{layers[0]}-{layers[1]}"
    return StepModel(geometry, named, weights, weights.format_of, activation, device)
