"""The routed experts and the packed product on the device against float64 (O1), bounded by twice what the same formula
loses in bfloat16 torch (O3); which tokens share a pass or a block changes no bit (O4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.native import harness
from tests.native.experts_cases import Layer, LayerCase, random_matrix
from tests.tolerance import FACTOR

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable())),
    pytest.mark.usefixtures("installed_library"),
]  # fmt: skip

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.ops import native_experts
    from trtllm_replayssm.runtime.session.expert_stacks import stack

CASES = [
    LayerCase("nvfp4", 8, 128, 512, 2, False, 37),
    LayerCase("nvfp4", 8, 256, 96, 2, True, 5),
    LayerCase("nvfp4", 16, 1024, 2688, 4, False, 64),
    LayerCase("nvfp4", 6, 3072, 1024, 3, True, 96),
    LayerCase("nvfp4", 4, 128, 64, 4, True, 300),  # several passes an expert
    LayerCase("nvfp4", 512, 64, 32, 22, False, 40),
    LayerCase("nvfp4", 16, 1024, 256, 1, False, 1),
    LayerCase("fp8", 8, 128, 192, 3, False, 50),
    LayerCase("fp8", 8, 264, 96, 2, True, 33),
    LayerCase("bf16", 8, 128, 200, 3, False, 50),
    LayerCase("bf16", 4, 320, 96, 2, True, 130),
    LayerCase("fp8", 4, 128, 64, 3, False, 120),  # many tokens, but columns that are no whole steps of a warpgroup
    LayerCase("bf16", 4, 192, 128, 2, True, 150),
]
SUPER_MANY = LayerCase("nvfp4", 512, 128, 128, 22, False, 1024)  # 22,528 pairs: their plan is a cluster of blocks
DRAWN = LayerCase("nvfp4", 8, 1152, 2176, 4, False, 4096)  # some 256 passes: of both products blocks draw the last ones
# Passes of 32 tokens and more, both products of whole steps: on compute capability 9.0 by a warpgroup's instructions.
DEEP = [
    LayerCase("nvfp4", 8, 256, 384, 3, False, 200),  # 75 an expert: two passes; rounds of 24 and of 16 tiles
    LayerCase("nvfp4", 8, 128, 128, 2, True, 190),
    LayerCase("nvfp4", 8, 1024, 2688, 3, False, 150),  # Super's sizes: 5.25 and 2 rounds of 32 tiles
    LayerCase("nvfp4", 6, 3072, 1024, 2, True, 120),  # 122B's: 4 and 6
    LayerCase("nvfp4", 64, 256, 128, 8, True, 256),  # 32 an expert; 2,048 pairs
    LayerCase("nvfp4", 32, 256, 256, 6, False, 64),  # 12 an expert: passes of 32
    LayerCase("fp8", 32, 256, 256, 6, False, 64),
    LayerCase("bf16", 32, 256, 256, 6, True, 64),
    LayerCase("fp8", 8, 256, 128, 3, False, 140),
    LayerCase("fp8", 6, 512, 256, 2, True, 130),
    LayerCase("bf16", 8, 256, 128, 3, False, 140),
    LayerCase("bf16", 6, 512, 256, 2, True, 130),
    SUPER_MANY,
]


class DeviceLayer:
    """A layer's packed stacks on the device, and its inputs there."""

    def __init__(self, layer: Layer) -> None:
        device, count = torch.device("cuda"), layer.case.experts
        self.stacks = native_experts.ExpertStacks(
            up=stack(layer.up, count, device), down=stack(layer.down, count, device)
        )
        self.x, self.ids, self.weights = layer.x.cuda(), layer.ids.cuda(), layer.weights.cuda()

    def run(self) -> Any:
        poisoned = torch.full((64 << 20,), float("nan"), device="cuda")  # what large workspaces are cut from
        del poisoned
        return native_experts.experts(self.x, self.ids, self.weights, self.stacks)


def assert_close(got: Any, truth: Any, plain: Any) -> None:
    """The kernel's error against the truth, as a whole and at its worst, within twice that of plain bfloat16."""
    got = got.double().cpu()
    assert torch.isfinite(got).all()
    for size in (torch.linalg.vector_norm, lambda t: t.abs().max()):
        assert size(got - truth) <= FACTOR * size(plain - truth)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_equal_the_formula(case: LayerCase) -> None:
    layer = Layer(case)
    if case.tokens > 10:
        layer.ids[torch.from_numpy(np.random.default_rng(1).random(layer.ids.shape) < 0.1)] = -1
        layer.ids[3] = -1
    on_device = DeviceLayer(layer)
    got = on_device.run()
    assert_close(got, layer.result(rounded=False), layer.result(rounded=True))
    if case.tokens > 10:
        assert not got[3].any(), "a token without choices"
    assert torch.equal(got, on_device.run())


def make_uneven(ids: Any, seed: int) -> None:
    """Some choices absent, a token without any, one expert with many tokens and the others with few."""
    rng = np.random.default_rng(seed)
    ids[torch.from_numpy(rng.random(ids.shape) < 0.07)] = -1
    ids[3] = -1
    rows = torch.from_numpy(rng.random(len(ids)) < 0.3)
    ids[rows, 0] = 1
    for k in range(1, ids.shape[1]):
        ids[rows & (ids[:, k] == 1), k] = -1  # a token chooses an expert once


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("case", DEEP, ids=str)
def test_many_tokens_equal_the_formula(case: LayerCase, uneven: bool) -> None:
    layer = Layer(case, seed=case.tokens)
    if uneven:
        make_uneven(layer.ids, seed=7)
    device = DeviceLayer(layer)
    got = device.run()
    assert_close(got, layer.result(rounded=False), layer.result(rounded=True))
    assert torch.equal(got, device.run())


def test_all_tokens_to_one_expert() -> None:
    layer = Layer(LayerCase("nvfp4", 4, 256, 128, 1, False, 700))
    layer.ids.fill_(2)
    assert_close(DeviceLayer(layer).run(), layer.result(rounded=False), layer.result(rounded=True))


@pytest.mark.parametrize("case", [LayerCase("nvfp4", 4, 256, 128, 3, True, 250), SUPER_MANY, DRAWN], ids=str)
def test_a_token_does_not_depend_on_the_others(case: LayerCase) -> None:
    """Alone, among few and among so many that an expert takes several passes or the plan a cluster: the same bits."""
    device = DeviceLayer(Layer(case))
    whole = device.run()
    for count in (1, 9, 40, 130):
        part = native_experts.experts(device.x[:count], device.ids[:count], device.weights[:count], device.stacks)
        assert torch.equal(part, whole[:count]), count


@pytest.mark.parametrize("tokens", [5, 120], ids=["few", "many"])
@pytest.mark.parametrize("gated", [False, True], ids=["relu2", "swiglu"])
def test_a_token_that_is_not_a_number_stays_so(gated: bool, tokens: int) -> None:
    """And touches no other: NaN is what a broken layer before gives, and it must be seen behind the experts."""
    device = DeviceLayer(Layer(LayerCase("nvfp4", 8, 256, 128, 2, gated, tokens)))
    whole = device.run()
    device.x[1] = float("nan")
    got = device.run()
    assert got[1].isnan().all()
    others = [0, *range(2, tokens)]
    assert torch.equal(got[others], whole[others])


def test_ids_out_of_range_give_no_work() -> None:
    layer = Layer(LayerCase("nvfp4", 4, 128, 64, 2, False, 12))
    device = DeviceLayer(layer)
    device.ids[:, 1] = -1
    expected = device.run()
    device.ids[:, 1] = torch.tensor([4, 1 << 30, -5, -(1 << 31)] * 3, dtype=torch.int32, device="cuda")
    assert torch.equal(device.run(), expected)


def test_a_captured_call_follows_the_routing() -> None:
    """One capture serves other routings of the same number of tokens: nothing of the plan is on the host."""
    layer = Layer(LayerCase("nvfp4", 32, 128, 64, 4, False, 24))
    device = DeviceLayer(layer)
    device.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = device.run()
    for shift in (0, 5, 17):
        device.ids.copy_((layer.ids + shift) % 32)
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, device.run()), shift
    device.ids.fill_(2)  # all tokens to one expert
    device.ids[:, 1:] = -1
    graph.replay()
    replayed = captured.clone()
    assert torch.equal(replayed, device.run()) and replayed.any()


def test_layers_of_many_tokens_follow_each_other() -> None:
    """Launches overlap: three layers in one graph, replayed with other routings, equal those that run one by one."""
    layer = Layer(LayerCase("nvfp4", 16, 256, 256, 4, False, 300))
    device = DeviceLayer(layer)
    inputs = [device.x, device.x.flip(0).contiguous(), device.x * 0.5]

    def run_all() -> list[Any]:
        return [native_experts.experts(x, device.ids, device.weights, device.stacks) for x in inputs]

    run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_all()
    for shift in (0, 5, 11):
        device.ids.copy_((layer.ids + shift) % 16)
        for _ in range(20):
            graph.replay()
        replayed = [out.clone() for out in captured]
        for x, got in zip(inputs, replayed, strict=True):
            alone = native_experts.experts(x, device.ids, device.weights, device.stacks)
            torch.cuda.synchronize()
            assert torch.equal(got, alone), shift


@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize(("tokens", "columns", "rows"), [(5, 256, 320), (200, 1024, 640), (70, 320, 96), (9, 128, 46)])
def test_packed_product_equals_the_matrix(kind: str, tokens: int, columns: int, rows: int) -> None:
    rng = np.random.default_rng(tokens)
    matrix = random_matrix(rng, kind, rows, columns)
    wide = torch.from_numpy(rng.standard_normal((tokens, columns + 8))).to(torch.bfloat16)
    x = wide[:, 8:]
    weight = stack([(matrix,)], 1, torch.device("cuda"))
    got = native_experts.packed_linear(wide.cuda()[:, 8:], weight)
    truth = x.double() @ torch.from_numpy(matrix.dequantize(np.float64)).T
    assert_close(got, truth, truth.to(torch.bfloat16).double())
