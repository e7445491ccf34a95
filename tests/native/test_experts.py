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
    LayerCase("fp8", 4, 128, 64, 3, False, 120),  # these two fit a warpgroup's instructions
    LayerCase("bf16", 4, 192, 128, 2, True, 150),
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


def test_a_token_does_not_depend_on_the_others() -> None:
    """Alone, among few and among so many that an expert takes several passes: the same bits."""
    layer = Layer(LayerCase("nvfp4", 4, 256, 128, 3, True, 250))
    device = DeviceLayer(layer)
    whole = device.run()
    for count in (1, 9, 40, 130):
        part = native_experts.experts(device.x[:count], device.ids[:count], device.weights[:count], device.stacks)
        assert torch.equal(part, whole[:count]), count


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
