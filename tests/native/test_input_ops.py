"""The custom operations of a layer's inputs against the reference operations they stand in for, on the device.

Oracle O3: both round the same float32 formulas once, so results differ by one step of the output type at most.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.ops import _abi
    from trtllm_replayssm.ops.layer_state import CursorTensors, StepRows
    from trtllm_replayssm.ops.native import Convolution, NativeOps
    from trtllm_replayssm.ops.reference import conv1d, gdn, mamba2

CHANNELS, HEADS, SLOTS, ROWS = 96, 6, 5, 10


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return NativeOps(_abi.Library(harness.LIBRARY), torch.device("cuda"))


def close(got: Any, want: Any, step: float) -> bool:
    return bool(((got.double() - want.double()).abs() <= step * want.double().abs() + 1e-6).all())


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("kind", [SsmKind.MAMBA2, SsmKind.GDN], ids=lambda kind: kind.value)
def test_one_launch_does_what_the_reference_operations_do(ops: NativeOps, kind: SsmKind, prompt: bool) -> None:
    torch.manual_seed(3)
    width, act = (30 if prompt else 4), torch.bfloat16
    shape = ssm_shape(kind, HEADS, 2, 8, 8)
    projection = torch.randn(3, width, CHANNELS + 2 * HEADS, device="cuda").to(act)
    x, first, second = projection.split([CHANNELS, HEADS, HEADS], dim=-1)
    weight, bias = torch.randn(CHANNELS, 1, 4, device="cuda"), torch.randn(CHANNELS, device="cuda")
    dt_bias, a_log = torch.randn(HEADS, device="cuda"), torch.rand(HEADS, device="cuda")
    cursors = CursorTensors.allocate(SLOTS, torch.device("cuda"))
    cursors.position += torch.arange(SLOTS, device="cuda").int() * 2
    counts = torch.tensor([width, 2, width - 1], device="cuda")
    rows = StepRows(torch.tensor([4, -1, 0], device="cuda"), counts)
    windows = [torch.randn(SLOTS, ROWS, CHANNELS, device="cuda").to(act)] * 2
    windows[1] = windows[0].clone()
    want = conv1d.conv1d_update(windows[1], cursors, rows, x, weight, bias)
    gdn_kind = kind is SsmKind.GDN
    conv = Convolution(0, windows[0], x, weight[:, 0], bias, torch.empty(x.shape, dtype=act, device="cuda"), prompt)
    decay, beta = ops.ssm_inputs(
        shape, conv, cursors, rows, first, second if gdn_kind else None, dt_bias, a_log=a_log if gdn_kind else None
    )
    expected = gdn.gates(first, second, a_log, dt_bias) if gdn_kind else [mamba2.discretise(first, dt_bias)] * 2
    assert close(conv.out, want, 2.0**-7), (conv.out - want).abs().max()
    assert torch.equal(windows[0], windows[1])
    for got, reference in zip((decay, beta), expected, strict=True):
        for row, count in ((0, width), (2, width - 1)):
            assert close(got[row, :count], reference[row, :count], 1e-6)
        assert (got[1] == 0).all() and (got[2, width - 1 :] == 0).all()
