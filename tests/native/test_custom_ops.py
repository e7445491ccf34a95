"""The custom operations on the device: compiled, captured and called plainly, they change the same bits.

Oracle O4: the same kernel through another path, so everything is compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState, StepRows
    from trtllm_replayssm.ops.native import NativeOps
    from trtllm_replayssm.ops.native_library import load_library

SHAPES = [
    pytest.param(ssm_shape(SsmKind.MAMBA2, 8, 2, 64, 128), id="mamba2"),
    pytest.param(ssm_shape(SsmKind.GDN, 8, 4, 128, 128), id="gdn"),
]
ROWS, WINDOW = 3, 4


class Layer:
    """One layer's pool and a plain step over it; equal seeds give equal pools."""

    def __init__(self, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("REPLAYSSM_NATIVE_LIBRARY", str(harness.LIBRARY))
        device = torch.device("cuda")
        generator = torch.Generator("cuda").manual_seed(5)
        self.shape, self.config = shape, ReplayConfig(window=WINDOW)
        self.state = ReplayLayerState.allocate(shape, self.config, 0, ROWS + 1, torch.bfloat16, device)
        self.state.checkpoint.data.normal_(generator=generator)
        self.cursors = CursorTensors.allocate(ROWS + 1, device)
        ones = torch.ones(ROWS, device=device, dtype=torch.int64)
        self.rows = StepRows(torch.tensor([2, -1, 0], device=device), ones)
        self.ops = NativeOps(load_library(harness.LIBRARY), device)
        assert self.ops.unsupported(self.state, self.cursors, torch.bfloat16) is None
        self.value = torch.randn(ROWS, 1, shape.heads, shape.head_dim, device=device, generator=generator).bfloat16()
        self.key = torch.randn(ROWS, 1, shape.groups, shape.state_dim, device=device, generator=generator).bfloat16()
        self.scalar = torch.rand(ROWS, 1, shape.heads, device=device, generator=generator)
        self.vector = -torch.rand(shape.heads, device=device, generator=generator)

    def step(self, value: Any) -> Any:
        """Update, commit and some arithmetic around them."""
        args = (self.state, self.cursors, self.rows)
        if self.shape.kind is SsmKind.GDN:
            out = self.ops.gdn_update(*args, self.key, self.key * 2, value, -self.scalar, self.scalar)
        else:
            out = self.ops.mamba2_update(
                *args, value, self.key, self.key * 2, self.scalar, self.vector, d_skip=self.vector
            )
        self.ops.commit(self.config, self.cursors, self.rows, torch.ones(ROWS, dtype=torch.int64, device="cuda"))
        return out * 2

    def tensors(self) -> list[Any]:
        return [*self.state.tensors(), *self.cursors.tensors()]


def assert_same(layers: list[Layer], outputs: list[Any]) -> None:
    torch.cuda.synchronize()
    assert all(torch.equal(outputs[0], out) for out in outputs[1:])
    for first, other in zip(layers[0].tensors(), layers[1].tensors(), strict=True):
        assert torch.equal(first, other)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_compiled_step_changes_the_same_bits(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer(shape, monkeypatch) for _ in range(2)]
    compiled: Callable[..., Any] = torch.compile(layers[1].step, fullgraph=True, backend="aot_eager")
    for _ in range(2 * WINDOW + 1):
        assert_same(layers, [layers[0].step(layers[0].value), compiled(layers[1].value)])
    assert int(layers[0].cursors.position[2]) == 2 * WINDOW + 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_captured_step_follows_the_cursors(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer(shape, monkeypatch) for _ in range(2)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for layer in layers:
            layer.step(layer.value)  # warm-up, on both
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers[1].step(layers[1].value)
    for _ in range(2 * WINDOW):
        graph.replay()
        assert_same(layers, [layers[0].step(layers[0].value), captured])
