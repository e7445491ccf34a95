"""Quantised matmuls: one layer against the formats' definitions, whole models against the torch session.

Oracle O1 for a layer: the quantisation of activations and weights is written out here in float64. A whole model with
quantised activations amplifies a value that rounds to the other neighbour, so that only the size of what quantisation
does is compared: a model that took unquantised activations, or another scale, is far outside.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

import tensorrt_rtx

from tests.builders.bundles import evaluated_session, trace_networks
from tests.builders.evaluator import NetworkEvaluator
from tests.builders.quantised import mixed_checkpoint
from tests.builders.test_evaluated_sessions import FLOAT32, REPLAY, drive, options
from tests.tolerance import FACTOR
from trtllm_replayssm.bindings import TensorSpec
from trtllm_replayssm.builders.compiler import Compiler
from trtllm_replayssm.builders.flavour import FlavourName, load
from trtllm_replayssm.builders.linear import linear
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.builders.quantize_encode import absolute_maximum, encode_nvfp4, nvfp4_scale_2
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.runtime.session.torch_graph import TorchGraph
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import DenseMatrix, Fp8Matrix, Matrix, MatrixFormat, Nvfp4Matrix

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
ROWS, COLUMNS = 24, 64
# A layer's error relative to its largest output. Accepts float32 sums of 64 products; rejects one value that rounds to
# the other neighbour (1e-3 and more).
LAYER_NOISE = 1e-5
INPUT_SCALES = {MatrixFormat.FP8: float(np.float32(0.04)), MatrixFormat.NVFP4: float(np.float32(0.007))}


def quantised(x: np.ndarray[Any, Any], fmt: MatrixFormat, factor: float) -> np.ndarray[Any, Any]:
    """The values that activations have as FP8 or NVFP4 below `factor`; NVFP4: last axis in blocks of 16."""
    factor32 = np.float32(factor)
    if fmt is MatrixFormat.FP8:
        return np.clip(x / factor32, -448, 448).astype(E4M3).astype(np.float64) * factor
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    scale = np.minimum(np.abs(blocks).max(-1, keepdims=True) / np.float32(6) / factor32, 448).astype(E4M3)
    divisor = scale.astype(np.float32) * factor32
    codes = np.clip(blocks / np.where(divisor > 0, divisor, 1), -6, 6).astype(E2M1).astype(np.float64)
    return (codes * divisor).reshape(x.shape)


def random_matrix(kind: str, rng: np.random.Generator) -> Matrix:
    values = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    if kind == "nvfp4":
        scale_2 = nvfp4_scale_2(absolute_maximum(values))
        return Nvfp4Matrix(*encode_nvfp4(values, scale_2), float(scale_2))
    scale = np.abs(values).max(axis=1, keepdims=True) / 448 if kind == "fp8 rows" else np.float32(0.01)
    scale = np.asarray(scale, dtype=np.float32)
    return Fp8Matrix((values / scale).astype(E4M3), scale)


def evaluate(matrix: Matrix, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One linear layer as the builder makes it, evaluated."""
    compiler = Compiler(load(FlavourName.RTX, "12.0"), {}, slots=1, activation="float32", tick=lambda: None)
    net = compiler.new_network()
    tensor = net.input(TensorSpec(name="x", dtype="float32", dims=("B", "T", COLUMNS)))
    net.output(linear(net, tensor, "layer.weight", matrix), "y")
    evaluator = NetworkEvaluator(tensorrt_rtx, net.definition, net.constants)
    return evaluator.run({"x": torch.from_numpy(x)})["y"].numpy()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "fp8 rows"])
def test_a_layer_quantises_its_input_and_decodes_its_weights(kind: str, scaled: bool) -> None:
    rng = np.random.default_rng(4)
    matrix = random_matrix(kind, rng)
    assert not isinstance(matrix, DenseMatrix)
    factor = INPUT_SCALES[matrix.format] if scaled else 1.0
    x = rng.standard_normal((2, 3, COLUMNS), dtype=np.float32) * np.float32(8)
    x[0, 0, :16] = 0  # a block without a scale
    x[1, 2, 5] = 500  # beyond what FP8 holds
    expected = quantised(x, matrix.format, factor) @ matrix.dequantize(np.float64).T
    got = evaluate(replace(matrix, input_scale=factor if scaled else None), x)
    assert np.abs(got - expected).max() <= LAYER_NOISE * np.abs(expected).max()
    plain = x.astype(np.float64) @ matrix.dequantize(np.float64).T
    assert np.abs(plain - expected).max() > 100 * LAYER_NOISE * np.abs(expected).max()


def with_quantised_inputs(checkpoint: Checkpoint) -> Any:
    """`TorchGraph.linear` with its input quantised in front of a quantised matrix."""

    def run(self: TorchGraph, x: torch.Tensor, weight: str) -> torch.Tensor:
        fmt = checkpoint.storage(weight)[0].format
        if fmt.quantised:
            x = torch.from_numpy(quantised(x.numpy(), fmt, 1.0).astype(np.float32))
        return functional.linear(x, self._weights.matrix(weight))

    return run


@pytest.mark.parametrize("name", ["nemotron-tiny", "qwen3_5-moe-tiny"])
def test_whole_models_lose_what_quantised_activations_cost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distance to unquantised activations is that of the torch session with quantised ones."""
    pool = PoolConfig(slots=4, max_seq_len=160, activation=FLOAT32)
    with Checkpoint.open(mixed_checkpoint(name)) as checkpoint:
        networks = trace_networks(CheckpointParameters(checkpoint), options())
        ours = [x for x in drive(evaluated_session(networks, tmp_path)) if x.size]
        exact = [x for x in drive(TorchSession.from_checkpoint(checkpoint, REPLAY, pool)) if x.size]
        monkeypatch.setattr(TorchGraph, "linear", with_quantised_inputs(checkpoint))
        fair = [x for x in drive(TorchSession.from_checkpoint(checkpoint, REPLAY, pool)) if x.size]

    def distance(got: list[Any]) -> float:
        return float(np.sqrt(np.mean([np.square(x - y).mean() for x, y in zip(got, exact, strict=True)])))

    assert distance(fair) > 0.01  # quantising activations is visible at all
    assert distance(fair) / FACTOR <= distance(ours) <= distance(fair) * FACTOR
