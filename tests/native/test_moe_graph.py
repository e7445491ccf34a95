"""A mixture-of-experts layer of the torch interpreter by the kernels: as close to float32 as its own torch operations
in bfloat16 (O3) whatever stands at tokens that do not exist, and no wait for the device.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.native import harness
from tests.paths import ROOT
from tests.tolerance import FACTOR
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.models import nemotron_h, qwen3_5
from trtllm_replayssm.shapes import Family
from trtllm_replayssm.weights.checkpoint import Checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.ops.layer_state import StepRows
    from trtllm_replayssm.ops.native import NativeOps
    from trtllm_replayssm.ops.native_library import load_library
    from trtllm_replayssm.runtime.pools.state_pools import StatePools
    from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
    from trtllm_replayssm.runtime.session.torch_graph import TorchGraph
    from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
    from trtllm_replayssm.runtime.session.torch_weights import TorchWeights

CHECKPOINTS = ROOT / "tests" / "checkpoints"
MODELS = ("nemotron-moe", "nemotron-moe-groups", "qwen-moe")
POOL = PoolConfig(slots=5, max_seq_len=16, activation=ActivationDtype.BFLOAT16)  # no layer of experts reads one
SLOTS, TOKENS = (2, -1, 0, 1, 4), (3, 3, 1, 0, 2)


def names_of(checkpoint: Checkpoint) -> Any:
    """Of the first layer of experts."""
    prefix = next(n for n in checkpoint.names() if ".experts." in n).split("experts.")[0]
    if checkpoint.geometry.family is Family.NEMOTRON_H:
        return nemotron_h._moe_names(checkpoint.geometry, prefix)
    return qwen3_5._moe_names(prefix)


class Layer:
    """One layer of a small checkpoint on the device; native: by the kernels."""

    def __init__(self, model: str, dtype: Any, *, native: bool) -> None:
        device = torch.device("cuda")
        self.checkpoint = Checkpoint.open(CHECKPOINTS / model)
        self.weights = TorchWeights(self.checkpoint, dtype, device)
        slot, count = (torch.tensor(values, dtype=torch.int32, device=device) for values in (SLOTS, TOKENS))
        start, last = torch.zeros(len(SLOTS), dtype=torch.int64, device=device), torch.ones_like(slot).bool()
        context = StepContext(Phase.DECODE, StepRows(slot, count), start, max(TOKENS), last)
        pools = StatePools.allocate(self.checkpoint.geometry, ReplayConfig(), POOL, conventional=False, device=device)
        kernels = NativeOps(load_library(harness.LIBRARY), device) if native else None
        self.graph = TorchGraph(self.weights, StateOps(pools, kernels), context)

    def run(self, x: Any) -> Any:
        shape = self.checkpoint.geometry.moe
        assert shape is not None
        return self.graph.moe(x, names_of(self.checkpoint), shape)


@pytest.mark.parametrize("model", MODELS)
def test_the_layer_is_as_close_to_float32_as_its_torch_operations(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_NATIVE_LIBRARY", str(harness.LIBRARY))
    generator = torch.Generator("cuda").manual_seed(3)
    native = Layer(model, torch.bfloat16, native=True)
    shape = (len(SLOTS), max(TOKENS), native.checkpoint.geometry.hidden)
    x = torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)
    truth = Layer(model, torch.float32, native=False).run(x.float())
    plain = Layer(model, torch.bfloat16, native=False).run(x)
    exists = torch.tensor([[s >= 0 and t < n for t in range(max(TOKENS))] for s, n in zip(SLOTS, TOKENS, strict=True)])
    x[~exists.cuda()] = float("nan")
    native.run(x)  # packs the experts
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = native.run(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    error, noise = (torch.linalg.vector_norm((t.float() - truth)[exists.cuda()]) for t in (got, plain))
    assert truth.any() and error <= FACTOR * noise, (error, noise)
