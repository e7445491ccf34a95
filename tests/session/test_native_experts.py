"""A mixture-of-experts layer takes the path of CUDA on a CPU, its kernels stood in for by formulas: gate, sum and order
of the products are those of the layer without kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.native.test_moe_graph import names_of
from tests.paths import ROOT
from tests.tolerance import FACTOR
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.ops import native_experts, native_layers
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.ops.native_layers import Function
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session import torch_graph
from trtllm_replayssm.runtime.session.native_layers import NativeLayers
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.torch_graph import TorchGraph
from trtllm_replayssm.runtime.session.torch_moe import route, routed_experts
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import MoeShape
from trtllm_replayssm.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
SLOTS, TOKENS = (2, -1, 0, 1, 4), (3, 3, 1, 0, 2)


def activation(function: Function, x: Tensor, factor: Tensor | None = None, opening: Tensor | None = None) -> Tensor:
    out = functional.silu(x.float()) if function is Function.SILU else functional.relu(x.float()).square()
    out = out if factor is None else out * factor.float()
    return (out if opening is None else out * opening.sigmoid()[:, None]).to(x.dtype)


def scores(x: Tensor, parts: Tensor) -> Tensor:
    return x.float() @ parts.float().sum(0).t()


def graph_of(checkpoint: Checkpoint, dtype: torch.dtype) -> TorchGraph:
    slot, count = (torch.tensor(values, dtype=torch.int32) for values in (SLOTS, TOKENS))
    start, last = torch.zeros(len(SLOTS), dtype=torch.int64), torch.ones(len(SLOTS), dtype=torch.bool)
    context = StepContext(Phase.DECODE, StepRows(slot, count), start, max(TOKENS), last)
    pool = PoolConfig(slots=5, max_seq_len=16, activation=ActivationDtype.BFLOAT16)
    pools = StatePools.allocate(checkpoint.geometry, ReplayConfig(), pool, conventional=False, device=CPU)
    return TorchGraph(TorchWeights(checkpoint, dtype, CPU), StateOps(pools, None), context)


class Kernels:
    """Makes a graph run by formulas in place of the kernels. heads: attention is served as well."""

    def __init__(self, graph: TorchGraph, monkeypatch: pytest.MonkeyPatch, prefix: str, *, heads: bool) -> None:
        monkeypatch.setattr(StateOps, "native", self)
        graph._layers = NativeLayers(graph._ctx) if heads else None
        self._graph, self._prefix = graph, prefix
        monkeypatch.setattr(torch_graph, "scores", scores)
        monkeypatch.setattr(native_experts, "route", self.route)
        monkeypatch.setattr(native_experts, "experts", self.experts)
        monkeypatch.setattr(native_layers, "activation", activation)
        monkeypatch.setattr(graph._weights, "expert_stacks", lambda *_, **__: None)

    def route(self, logits: Tensor, bias: Tensor | None, shape: MoeShape, rows: StepRows) -> tuple[Tensor, Tensor]:
        assert logits.shape == (len(SLOTS), max(TOKENS), shape.experts)
        self._shape = shape
        ids, weights = route(logits.flatten(0, 1), bias, shape)
        return torch.where(self._graph._ctx.valid().view(-1, 1), ids, -1), weights

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, _: Any) -> Tensor:
        stack = self._graph._weights.expert
        return routed_experts(x, ids, weights, self._shape, lambda name, e: stack(f"{self._prefix}.{name}", e))


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("model", ["nemotron-moe", "nemotron-moe-groups", "qwen-moe"])
def test_the_layer_is_as_close_to_float32_as_without_kernels(
    model: str, monkeypatch: pytest.MonkeyPatch, *, heads: bool
) -> None:
    checkpoint = Checkpoint.open(ROOT / "tests" / "checkpoints" / model)
    names, shape = names_of(checkpoint), checkpoint.geometry.moe
    assert shape is not None
    graph = graph_of(checkpoint, torch.bfloat16)
    exists = graph._ctx.valid()
    x = torch.randn((*exists.shape, checkpoint.geometry.hidden), generator=torch.Generator().manual_seed(3)).bfloat16()
    truth = graph_of(checkpoint, torch.float32).moe(x.float(), names, shape)[exists]
    plain = graph.moe(x, names, shape)[exists]
    Kernels(graph, monkeypatch, names.experts, heads=heads)
    x[~exists], column = float("nan"), torch.tensor([shape.experts])
    got = graph.moe(x, names, shape)[exists]
    error, noise = (torch.linalg.vector_norm(t.float() - truth) for t in (got, plain))
    assert truth.any() and error <= FACTOR * noise, (error, noise)
    if names.shared_gate is not None:  # and far from it where the shared expert is opened by something else
        monkeypatch.setattr(torch_graph, "scores", lambda x, parts: scores(x, parts).index_fill(1, column, 0.0))
        assert torch.linalg.vector_norm(graph.moe(x, names, shape)[exists].float() - truth) > 4 * FACTOR * noise
