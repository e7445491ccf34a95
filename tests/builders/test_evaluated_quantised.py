"""Quantised matmuls of the networks, against the torch session with its activations quantised in front of them.

Oracle O4: the quantisation of activations is written out here in numpy, from the formats' definitions: FP8 by a factor
of the whole tensor, NVFP4 by an E4M3 scale per 16 values. Whole models agree up to values that round to the other
neighbour; a matmul that took unquantised activations, or another scale, is an order of magnitude away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import evaluated_session, trace_networks
from tests.builders.quantised import mixed_checkpoint
from tests.builders.test_evaluated_sessions import FLOAT32, REPLAY, drive, options
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.runtime.session.torch_graph import TorchGraph
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import MatrixFormat

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
# Largest difference of a step relative to the difference that quantising activations makes at all, in the mean. Accepts
# activations that fall to the other neighbour in some later layer; rejects a scale off by a step of its own format.
SHARE = 0.02


def quantised(values: np.ndarray[Any, Any], fmt: MatrixFormat) -> np.ndarray[Any, Any]:
    """The values that an activation has as FP8 (factor 1) or NVFP4 (factor 1), last axis in blocks of 16."""
    if fmt is MatrixFormat.FP8:
        return np.clip(values, -448, 448).astype(E4M3).astype(np.float32)
    blocks = values.reshape(*values.shape[:-1], -1, 16)
    scale = (np.abs(blocks).max(-1, keepdims=True) / np.float32(6)).astype(E4M3).astype(np.float32)
    safe = np.where(scale > 0, scale, 1)
    codes = np.clip(blocks / safe, -6, 6).astype(E2M1).astype(np.float32)
    return np.where(scale > 0, codes * scale, 0).astype(np.float32).reshape(values.shape)


def linear_with_quantised_inputs(checkpoint: Checkpoint) -> Any:
    def linear(self: TorchGraph, x: Tensor, weight: str) -> Tensor:
        fmt = checkpoint.storage(weight)[0].format
        if fmt.quantised:
            x = torch.from_numpy(quantised(x.numpy(), fmt))
        return functional.linear(x, self._weights.matrix(weight))

    return linear


@pytest.mark.parametrize("name", ["nemotron-tiny", "qwen3_5-moe-tiny"])
def test_activations_are_quantised_in_front_of_quantised_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = PoolConfig(slots=4, max_seq_len=160, activation=FLOAT32)
    with Checkpoint.open(mixed_checkpoint(name)) as checkpoint:
        networks = trace_networks(CheckpointParameters(checkpoint), options())
        ours = [x for x in drive(evaluated_session(networks, tmp_path)) if x.size]
        exact = [x for x in drive(TorchSession.from_checkpoint(checkpoint, REPLAY, pool)) if x.size]
        monkeypatch.setattr(TorchGraph, "linear", linear_with_quantised_inputs(checkpoint))
        expected = [x for x in drive(TorchSession.from_checkpoint(checkpoint, REPLAY, pool)) if x.size]

    def error(left: list[Any], right: list[Any]) -> float:
        return float(np.sqrt(np.mean([np.square(x - y).mean() for x, y in zip(left, right, strict=True)])))

    effect = error(expected, exact)
    assert effect > 0.01  # quantising activations is visible at all
    assert error(ours, expected) <= SHARE * effect
