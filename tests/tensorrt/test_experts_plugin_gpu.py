"""`enqueue` of `MoeExperts` on a GPU: the bits of rssm_route and rssm_experts, and near the formula in float64.

Oracles O4 (the C ABI, compared with the specification in tests/native) and O1 with the bound of tests/native: twice
what the same formula loses in bfloat16 torch (O3).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import harness
from tests.native.experts_cases import Layer, LayerCase
from tests.tensorrt import plugin_host
from tests.tolerance import FACTOR
from trtllm_replayssm.builders.plugin_fields import ROUTER_CODES, WEIGHT_FORMAT_CODES
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import MoeShape, Router
from trtllm_replayssm.weights.matrix import MatrixFormat

REASON = harness.unavailable() or plugin_host.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

if REASON is None:
    import torch
    from torch import Tensor

    from tests.tensorrt.plugin_cases import PluginCase
    from trtllm_replayssm.ops import native_experts
    from trtllm_replayssm.ops.layer_state import StepRows
    from trtllm_replayssm.runtime.session.expert_stacks import stack

FORMATS = {"nvfp4": MatrixFormat.NVFP4, "fp8": MatrixFormat.FP8, "bf16": MatrixFormat.BF16}
PAD = 8  # channels of a projection before what the plugin reads
ROWS, SLOTS, COUNTS = 5, [2, -1, 0, 4, 1], [3, 4, 0, 4, 1]
CASES = [
    LayerCase("nvfp4", 8, 128, 96, 2, True, 4), LayerCase("nvfp4", 32, 256, 128, 6, False, 4),
    LayerCase("fp8", 8, 128, 96, 2, True, 4), LayerCase("bf16", 8, 128, 200, 3, False, 4),
    LayerCase("nvfp4", 4, 64, 32, 2, True, 70),  # a prompt chunk
    LayerCase("nvfp4", 4, 128, 128, 2, True, 70),  # one whose tokens are copied into the workspace
]  # fmt: skip


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_NATIVE_LIBRARY", str(harness.LIBRARY))


def routing(case: LayerCase) -> MoeShape:
    """Nemotron's rule for plain experts, Qwen's for gated ones."""
    sigmoid = not case.gated
    return MoeShape(
        experts=case.experts, top_k=case.top_k, intermediate=case.inner, latent=None, shared_intermediate=8,
        gated=case.gated, shared_gated=False, router=Router.SIGMOID_BIAS if sigmoid else Router.SOFTMAX,
        n_group=4 if sigmoid else 1, topk_group=3 if sigmoid else 1, scaling=2.5 if sigmoid else 1.0,
    )  # fmt: skip


def fields(case: LayerCase, shape: MoeShape) -> dict[str, int | float]:
    return {
        "experts": case.experts, "top_k": case.top_k, "width": case.width, "intermediate": case.inner,
        "gated": int(case.gated), "weight_format": WEIGHT_FORMAT_CODES[FORMATS[case.kind]],
        "router": ROUTER_CODES[shape.router], "groups": shape.n_group, "topk_group": shape.topk_group, "norm_topk": 1,
        "scaling": shape.scaling, "activation": int(_abi.Dtype.BFLOAT16), "x_offset": PAD, "logits_offset": 1,
    }  # fmt: skip


def packed_inputs(stacks: native_experts.ExpertStacks) -> list[Tensor]:
    """What the plugin is given of the experts: bytes, scales, factors."""
    tensors = []
    for part in (stacks.up, stacks.down):
        tensors.append(part.data.view(torch.int8))
        tensors += [] if part.block_scale is None else [part.block_scale.view(torch.int8)]
        tensors.append(part.factor)
    return tensors


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plugin_routes_and_sums_as_the_library_does(case: LayerCase, gpu_host: Path, tmp_path: Path) -> None:
    shape, tokens = routing(case), case.tokens
    layer = Layer(LayerCase(case.kind, case.experts, case.width, case.inner, case.top_k, case.gated, ROWS * tokens))
    device = torch.device("cuda")
    stacks = native_experts.ExpertStacks(
        up=stack(layer.up, case.experts, device), down=stack(layer.down, case.experts, device)
    )
    random = torch.Generator("cuda").manual_seed(2)
    bias = torch.randn(case.experts, generator=random, device=device) * 0.1
    slot, count = (torch.tensor(values, dtype=torch.int32, device=device) for values in (SLOTS, COUNTS))
    rows, steps, outputs = StepRows(slot, count), [], []
    x = torch.full((ROWS, tokens, PAD + case.width), float("nan"), dtype=torch.bfloat16, device=device)
    x[..., PAD:] = layer.x.view(ROWS, tokens, -1).to(device)
    for step in range(3):
        logits = torch.randn(ROWS, tokens, 1 + case.experts, generator=random, device=device)
        ids, weights = native_experts.route(logits[..., 1:], bias, shape, rows)
        given = x[..., PAD:].reshape(ROWS * tokens, -1)
        out = native_experts.experts(given, ids, weights, stacks).view(ROWS, tokens, -1)
        live = (torch.arange(tokens, device=device) < count[:, None]) & (slot >= 0)[:, None]
        assert not out[~live].any(), "tokens that do not exist are zero"
        if step == 0:
            layer.ids, layer.weights = ids.cpu(), weights.cpu()
            truth, plain = layer.result(rounded=False), layer.result(rounded=True)
            assert (out.view(ROWS * tokens, -1).double().cpu() - truth).norm() <= FACTOR * (plain - truth).norm()
        steps.append([x.masked_fill(~live[..., None], float("nan")), logits, slot, count, bias, *packed_inputs(stacks)])
        outputs.append(out)
        slot, count = slot.roll(1), count.roll(1)
        rows = StepRows(slot, count)
    plugin = PluginCase("MoeExperts", fields(case, shape), steps, [], case.width)
    plugin.check(gpu_host, tmp_path, outputs, [])


@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (3, 0)])
def test_an_empty_step_does_nothing(rows: int, tokens: int, gpu_host: Path, tmp_path: Path) -> None:
    case = LayerCase("nvfp4", 8, 128, 96, 2, True, 1)
    layer, device = Layer(case), torch.device("cuda")
    stacks = native_experts.ExpertStacks(up=stack(layer.up, 8, device), down=stack(layer.down, 8, device))
    x = torch.zeros(rows, tokens, PAD + case.width, dtype=torch.bfloat16)
    index = torch.zeros(rows, dtype=torch.int32)
    step = [x, torch.zeros(rows, tokens, 9), index, index, torch.zeros(8), *packed_inputs(stacks)]
    plugin = PluginCase("MoeExperts", fields(case, routing(case)), [step], [], case.width)
    plugin.check(gpu_host, tmp_path, [], [])
