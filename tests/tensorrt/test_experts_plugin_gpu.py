"""`enqueue` of `MoeRoute` and `MoeExperts` on a GPU: the bits of rssm_route and rssm_experts, and near the formula in
float64; one of two ranks' share of the experts too.

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
pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.usefixtures("installed_library"),
]  # fmt: skip

if REASON is None:
    import torch
    from torch import Tensor

    from tests.tensorrt.plugin_cases import Call, PluginCase, PluginProgram
    from trtllm_replayssm.ops import native_experts
    from trtllm_replayssm.ops.layer_state import StepRows
    from trtllm_replayssm.runtime.session.expert_stacks import stack

FORMATS = {"nvfp4": MatrixFormat.NVFP4, "fp8": MatrixFormat.FP8, "bf16": MatrixFormat.BF16}
PAD = 8  # channels of a tensor before what the plugin reads
ROWS, SLOTS, COUNTS = 5, [2, -1, 0, 4, 1], [3, 4, 0, 4, 1]
CASES = [
    LayerCase("nvfp4", 8, 128, 96, 2, True, 4), LayerCase("nvfp4", 32, 256, 128, 6, False, 4),
    LayerCase("fp8", 8, 128, 96, 2, True, 4), LayerCase("bf16", 8, 128, 200, 3, False, 4),
    LayerCase("nvfp4", 4, 64, 32, 2, True, 70),  # a prompt chunk
    LayerCase("nvfp4", 4, 128, 128, 2, True, 70),  # one whose tokens are copied into the workspace
]  # fmt: skip


def routing(case: LayerCase) -> MoeShape:
    """Nemotron's rule for plain experts, Qwen's for gated ones."""
    sigmoid = not case.gated
    return MoeShape(
        experts=case.experts, top_k=case.top_k, intermediate=case.inner, latent=None, shared_intermediate=8,
        gated=case.gated, shared_gated=False, router=Router.SIGMOID_BIAS if sigmoid else Router.SOFTMAX,
        n_group=4 if sigmoid else 1, topk_group=3 if sigmoid else 1, scaling=2.5 if sigmoid else 1.0,
    )  # fmt: skip


def route_fields(case: LayerCase, shape: MoeShape) -> dict[str, int | float]:
    return {
        "experts": case.experts, "top_k": case.top_k, "router": ROUTER_CODES[shape.router], "groups": shape.n_group,
        "topk_group": shape.topk_group, "norm_topk": 1, "scaling": shape.scaling, "logits_offset": 1,
    }  # fmt: skip


def expert_fields(case: LayerCase, experts: int) -> dict[str, int | float]:
    return {
        "experts": experts, "top_k": case.top_k, "width": case.width, "intermediate": case.inner,
        "gated": int(case.gated), "weight_format": WEIGHT_FORMAT_CODES[FORMATS[case.kind]],
        "activation": int(_abi.Dtype.BFLOAT16), "x_offset": PAD, "ids_offset": 1, "weights_offset": PAD,
    }  # fmt: skip


def packed_inputs(stacks: native_experts.ExpertStacks) -> list[Tensor]:
    """What the plugin is given of the experts: bytes, scales, factors."""
    tensors = []
    for part in (stacks.up, stacks.down):
        tensors.append(part.data.view(torch.int8))
        tensors += [] if part.block_scale is None else [part.block_scale.view(torch.int8)]
        tensors.append(part.factor)
    return tensors


def behind(tensor: Tensor, pad: int, value: float) -> Tensor:
    """The tensor behind `pad` other channels, which nobody may read."""
    return torch.nn.functional.pad(tensor, (pad, 0), value=value)


class Steps:
    """Three steps of a layer: rows that move, logits that differ, and what the library chooses for them."""

    def __init__(self, case: LayerCase) -> None:
        tokens, device = case.tokens, torch.device("cuda")
        self.shape = routing(case)
        self.layer = Layer(
            LayerCase(case.kind, case.experts, case.width, case.inner, case.top_k, case.gated, ROWS * tokens)
        )
        random = torch.Generator("cuda").manual_seed(2)
        self.bias = torch.randn(case.experts, generator=random, device=device) * 0.1
        slot, count = (torch.tensor(values, dtype=torch.int32, device=device) for values in (SLOTS, COUNTS))
        self.rows: list[StepRows] = []
        self.logits, self.ids, self.weights = [], [], []
        for _ in range(3):
            self.rows.append(StepRows(slot, count))
            self.logits.append(torch.randn(ROWS, tokens, 1 + case.experts, generator=random, device=device))
            ids, weights = native_experts.route(self.logits[-1][..., 1:], self.bias, self.shape, self.rows[-1])
            live = ((torch.arange(tokens, device=device) < count[:, None]) & (slot >= 0)[:, None]).view(-1)
            assert bool((ids[~live] == -1).all()) and bool((ids[live] >= 0).all())
            self.ids.append(ids)
            self.weights.append(weights)
            slot, count = slot.roll(1), count.roll(1)

    def stacks(self, first: int, last: int) -> native_experts.ExpertStacks:
        """Experts first .. last - 1 as the kernels take them."""
        device = torch.device("cuda")
        parts = [stack(matrices[first:last], last - first, device) for matrices in (self.layer.up, self.layer.down)]
        return native_experts.ExpertStacks(up=parts[0], down=parts[1])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plugin_routes_as_the_library_does(case: LayerCase, gpu_host: Path, tmp_path: Path) -> None:
    made = Steps(case)
    steps = [
        [logits, rows.slot, rows.num_tokens, made.bias] for logits, rows in zip(made.logits, made.rows, strict=True)
    ]
    outputs = [tensor for pair in zip(made.ids, made.weights, strict=True) for tensor in pair]
    results = [(torch.int32, case.top_k), (torch.float32, case.top_k)]
    PluginCase("MoeRoute", route_fields(case, made.shape), steps, [], results).check(gpu_host, tmp_path, outputs, [])


@pytest.mark.parametrize("part", ["all", "lower half", "upper half"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plugin_sums_as_the_library_does(case: LayerCase, part: str, gpu_host: Path, tmp_path: Path) -> None:
    """A half is what one of two ranks has: ids are shifted to it, and those outside it give no work."""
    made, half = Steps(case), case.experts // 2
    first, last = {"all": (0, case.experts), "lower half": (0, half), "upper half": (half, case.experts)}[part]
    stacks, layer, steps, outputs = made.stacks(first, last), made.layer, [], []
    for step, (ids, weights) in enumerate(zip(made.ids, made.weights, strict=True)):
        own = torch.where((ids >= first) & (ids < last), ids - first, -1)
        x = layer.x.cuda()
        out = native_experts.experts(x, own, weights, stacks)
        if step == 0:
            layer.ids, layer.weights = torch.where(own >= 0, own + first, -1).cpu(), weights.cpu()
            truth, plain = layer.result(rounded=False), layer.result(rounded=True)
            assert (out.double().cpu() - truth).norm() <= FACTOR * (plain - truth).norm()
        unread = x.masked_fill((own < 0).all(-1)[:, None], float("nan"))
        given = [behind(unread, PAD, float("nan")), behind(ids - first, 1, 0), behind(weights, PAD, float("nan"))]
        steps.append([*(t.view(ROWS, case.tokens, -1) for t in given), *packed_inputs(stacks)])
        outputs.append(out)
    plugin = PluginCase("MoeExperts", expert_fields(case, last - first), steps, [], [(torch.bfloat16, case.width)])
    plugin.check(gpu_host, tmp_path, outputs, [])


@pytest.mark.parametrize("case", CASES[-2:], ids=str)
def test_experts_follow_their_router(case: LayerCase, gpu_host: Path, tmp_path: Path) -> None:
    """Both plugins as one program, also as one graph: what the router of this step chose is what the experts read."""
    made = Steps(case)
    stacks, outputs, steps = made.stacks(0, case.experts), [], []
    x = made.layer.x.cuda()
    for logits, rows, ids, weights in zip(made.logits, made.rows, made.ids, made.weights, strict=True):
        outputs.append(native_experts.experts(x, ids, weights, stacks))
        steps.append({"logits": logits, "slot": rows.slot, "num_tokens": rows.num_tokens})
    packed = {f"packed {i}": tensor for i, tensor in enumerate(packed_inputs(stacks))}
    start = {"bias": made.bias, "x": x.view(ROWS, case.tokens, -1), **packed}
    between = {
        "ids": torch.empty(ROWS, case.tokens, case.top_k, dtype=torch.int32),
        "weights": torch.empty(ROWS, case.tokens, case.top_k),
        "out": torch.empty(ROWS, case.tokens, case.width, dtype=torch.bfloat16),
    }
    fields = {**expert_fields(case, case.experts), "x_offset": 0, "ids_offset": 0, "weights_offset": 0}
    calls = [
        Call(
            "MoeRoute", route_fields(case, made.shape), ["logits", "slot", "num_tokens", "bias"], [], ["ids", "weights"]
        ),
        Call("MoeExperts", fields, ["x", "ids", "weights", *packed], [], ["out"]),
    ]
    PluginProgram(calls, start, between, steps, ["out"], []).check(gpu_host, tmp_path, outputs, [])


@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (3, 0)])
def test_an_empty_step_does_nothing(rows: int, tokens: int, gpu_host: Path, tmp_path: Path) -> None:
    case = LayerCase("nvfp4", 8, 128, 96, 2, True, 1)
    made, index = Steps(case), torch.zeros(rows, dtype=torch.int32)

    def nothing(channels: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, tokens, channels, dtype=dtype)

    step = [nothing(9, torch.float32), index, index, made.bias]
    results = [(torch.int32, 2), (torch.float32, 2)]
    PluginCase("MoeRoute", route_fields(case, made.shape), [step], [], results).check(gpu_host, tmp_path, [], [])
    step = [nothing(PAD + case.width, torch.bfloat16), nothing(3, torch.int32), nothing(PAD + 2, torch.float32)]
    step += packed_inputs(made.stacks(0, case.experts))
    plugin = PluginCase("MoeExperts", expert_fields(case, case.experts), [step], [], [(torch.bfloat16, case.width)])
    plugin.check(gpu_host, tmp_path, [], [])
