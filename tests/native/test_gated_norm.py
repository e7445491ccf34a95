"""The native gated group norm against the specification in float64 (spec/layers.py).

Bound: one rounding of the activation type plus a few float32 steps; a kernel that rounded the normalised value or the
gate on the way would be off by two roundings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.native import harness
from trtllm_replayssm.spec.layers import gated_rms_norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from tests.native.windows import rounding_bound
    from trtllm_replayssm.ops import _abi

EPS = 1e-5


class Case:
    """Inputs of one call; the gate is a slice of a wider tensor."""

    def __init__(self, groups: int, size: int, act: str, *, gate_first: bool, rows: int = 3, offset: int = 8) -> None:
        rng = np.random.default_rng(groups * size + offset)
        self.groups, self.act, self.gate_first = groups, act, gate_first
        dtype, width = getattr(torch, act), groups * size

        def draw(*shape: int) -> Any:
            return torch.from_numpy(rng.standard_normal(shape))

        self.x = (draw(rows, 2, width) * torch.from_numpy(rng.uniform(0.01, 30, (rows, 2, 1)))).to(dtype).cuda()
        wide = torch.full((rows, 2, width + 24), float("nan"), dtype=dtype, device="cuda")
        self.gate = wide[..., offset : offset + width]
        self.gate.copy_(draw(rows, 2, width) * 3)
        self.weight = draw(width if gate_first else size).float().cuda()
        self.out = torch.full_like(self.x, float("nan"))

    def run(self, library: _abi.Library, *, flags: int = 0) -> Any:
        view = harness.view
        library.gated_rms_norm(
            _abi.GatedRmsNormArgs(
                flags=flags, groups=self.groups, gate_first=int(self.gate_first), eps=EPS, x=view(self.x),
                gate=view(self.gate), weight=view(self.weight), out=view(self.out),
            ),
            harness.Pool._stream(),
        )  # fmt: skip
        torch.cuda.synchronize()
        return self.out

    def expected(self) -> Any:
        x, gate, weight = (t.double().cpu().numpy() for t in (self.x, self.gate, self.weight))
        return gated_rms_norm(x, gate, weight, EPS, groups=self.groups, gate_first=self.gate_first)

    def check(self, expected: Any) -> None:
        got = self.out.double().cpu().numpy()
        assert np.isfinite(got).all()
        bound = rounding_bound(expected, self.act, 4 * np.abs(expected))
        assert (np.abs(got - expected) <= bound).all(), (np.abs(got - expected) / bound).max()


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(
    ("groups", "size"),
    [(8, 960), (8, 1024), (32, 128), (64, 128), (1, 8), (3, 64), (5, 120), (2, 136), (2, 256), (1, 2048), (2, 2056),
     (1, 8192), (3, 20), (7, 3)],
)  # fmt: skip
def test_outputs_equal_the_specification(
    library: _abi.Library, groups: int, size: int, gate_first: bool, act: str
) -> None:
    case = Case(groups, size, act, gate_first=gate_first)
    case.run(library)
    case.check(case.expected())


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [128, 256, 1024, 2048])
def test_many_tokens_equal_the_specification(library: _abi.Library, size: int, act: str) -> None:
    """So many that a team of threads takes several."""
    case = Case(8192 // size, size, act, gate_first=False, rows=271)
    case.run(library)
    case.check(case.expected())


@pytest.mark.parametrize("gate_first", [True, False])
def test_an_unaligned_gate_is_read_right(library: _abi.Library, gate_first: bool) -> None:
    case = Case(4, 128, "bfloat16", gate_first=gate_first, offset=3)
    case.run(library)
    case.check(case.expected())


@pytest.mark.parametrize(("groups", "size", "gate_first"), [(8, 1024, True), (32, 128, False), (3, 20, True)])
def test_the_output_may_be_the_input(library: _abi.Library, groups: int, size: int, gate_first: bool) -> None:
    case = Case(groups, size, "bfloat16", gate_first=gate_first)
    expected = case.expected()
    case.out = case.x
    case.run(library)
    case.check(expected)


@pytest.mark.parametrize(("groups", "size", "rows"), [(8, 960, 300), (8, 960, 1100), (64, 128, 1000), (2, 2048, 700)])
def test_a_token_has_the_same_bits_in_any_batch_and_launch(
    library: _abi.Library, groups: int, size: int, rows: int
) -> None:
    many = Case(groups, size, "bfloat16", gate_first=True, rows=rows)
    want = many.run(library).clone()
    for row in (0, 7, rows - 1):
        one = Case(groups, size, "bfloat16", gate_first=True)
        one.x, one.gate, one.weight = many.x[row : row + 1], many.gate[row : row + 1], many.weight
        one.out = torch.full_like(one.x, float("nan"))
        assert torch.equal(one.run(library, flags=_abi.NORM_PROGRAMMATIC_LAUNCH)[0], want[row])
    many.check(many.expected())


def test_a_group_of_zeros_gives_zeros(library: _abi.Library) -> None:
    for gate_first in (True, False):
        case = Case(4, 128, "float16", gate_first=gate_first)
        case.x.zero_()
        assert (case.run(library) == 0).all()
