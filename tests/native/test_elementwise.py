"""The native norm and activations against the same formulas in float64.

Bound: one rounding of the activation type plus a few float32 steps; a kernel that rounded on the way would be off by
two roundings. The residual sum is rounded once by contract, so it is compared exactly.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.native import harness

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable())),
    pytest.mark.usefixtures("installed_library"),
]  # fmt: skip

if harness.unavailable() is None:
    import torch

    from tests.native.windows import rounding_bound
    from trtllm_replayssm.ops import native_layers
    from trtllm_replayssm.ops.native_layers import Function

EPS = 1e-5
ACTS = ("bfloat16", "float16")


def draw(*shape: int, act: str, seed: int = 0, spread: float = 1.0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed + shape[-1])
    return (torch.randn(shape, generator=generator, device="cuda") * spread).to(getattr(torch, act))


def check(got: Any, expected: Any, act: str) -> None:
    wanted, value = expected.cpu().numpy(), got.double().cpu().numpy()
    assert (abs(value - wanted) <= rounding_bound(wanted, act, 4 * abs(wanted))).all()


def normalised(x: Any, weight: Any, offset: float) -> Any:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight.double() + offset)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("unit_offset", [True, False])
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 3136), (7, 2560), (3, 4096), (2, 3072), (300, 320), (2, 8), (2, 8192), (2, 8200), (3, 13)]
)
def test_norms_equal_the_formula(rows: int, size: int, act: str, *, unit_offset: bool) -> None:
    x, weight = draw(rows, 2, size, act=act, spread=3.0), draw(size, act=act, seed=1).float()
    got = native_layers.rms_norm(x, weight, EPS, unit_offset=unit_offset)
    check(got, normalised(x, weight, float(unit_offset)), act)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("rows", "size"), [(1, 3136), (257, 2560), (3, 4096), (2, 8200), (3, 13)])
def test_the_sum_is_rounded_once_and_then_normalised(rows: int, size: int, act: str) -> None:
    x, residual = draw(rows, 2, size, act=act, spread=3.0), draw(rows, 2, size, act=act, seed=9)
    weight, total = draw(size, act=act, seed=1).float(), torch.full_like(x, float("nan"))
    got = native_layers.add_rms_norm(x, residual, total, weight, EPS, unit_offset=False)
    assert torch.equal(total, x + residual)
    check(got, normalised(total, weight, 0.0), act)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize(("rows", "size"), [(1, 3136), (257, 2560), (3, 4096), (2, 8200), (3, 13)])
def test_parts_of_a_product_are_added_in_their_order(rows: int, size: int, count: int, act: str) -> None:
    """In float32, and rounded once with the residual."""
    parts = draw(count, rows, 2, size, act="float32", spread=3.0)
    residual, weight = draw(rows, 2, size, act=act, seed=9), draw(size, act=act, seed=1).float()
    total = torch.full_like(residual, float("nan"))
    got = native_layers.add_parts_rms_norm(parts, residual, total, weight, EPS, unit_offset=False)
    whole = torch.zeros_like(parts[0])
    for part in parts:
        whole += part
    assert torch.equal(total, (whole + residual).to(residual.dtype))
    check(got, normalised(total, weight, 0.0), act)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight = draw(300, 1, 3136, act="bfloat16"), draw(3136, act="bfloat16").float()
    many = native_layers.rms_norm(x, weight, EPS, unit_offset=False)
    for row in (0, 7, 299):
        assert torch.equal(native_layers.rms_norm(x[row : row + 1], weight, EPS, unit_offset=False)[0], many[row])


def formula(function: Any, x: Any) -> Any:
    wide = x.double()
    if function is Function.RELU2:
        return wide.clamp(min=0).square()
    return wide.sigmoid() * (wide if function is Function.SILU else 1.0)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", ["SILU", "SIGMOID", "RELU2"])
@pytest.mark.parametrize(("shape", "offset"), [((1, 1, 9216), 0), ((33, 4, 12544), 0), ((3, 2, 64), 1), ((2, 1, 5), 0)])
def test_activations_equal_the_formula(shape: tuple[int, ...], offset: int, name: str, act: str) -> None:
    """offset: of a slice of a wider tensor; an odd one forbids wide accesses."""
    function, (rows, tokens, size) = Function[name], shape
    x = draw(rows, tokens, size + 16, act=act, spread=4.0)[..., offset : offset + size]
    factor = draw(rows, tokens, size, act=act, seed=3)
    check(native_layers.activation(function, x), formula(function, x), act)
    check(native_layers.activation(function, x, factor), formula(function, x) * factor.double(), act)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", ["SILU", "RELU2"])
@pytest.mark.parametrize(("rows", "size"), [(1, 1024), (300, 1024), (3, 13)])
def test_a_row_is_opened_by_a_column_of_a_projection(rows: int, size: int, name: str, act: str) -> None:
    """One of its float32 results for each row, other columns beside it; rounded once with the product."""
    function, x, factor = Function[name], draw(rows, size, act=act), draw(rows, size, act=act, seed=3)
    opening = torch.randn((rows, 24), generator=torch.Generator("cuda").manual_seed(7), device="cuda")[:, 16] * 4
    share = opening.double().sigmoid()[:, None]
    check(native_layers.activation(function, x, None, opening), formula(function, x) * share, act)
    check(native_layers.activation(function, x, factor, opening), formula(function, x) * factor.double() * share, act)
    opening[0] = float("nan")
    got = native_layers.activation(function, x, factor, opening)
    assert got[0].isnan().all() and not got[1:].isnan().any()


def test_an_activation_reads_heads_between_others() -> None:
    """The gates of a projection that holds them beside the queries of each head."""
    heads = draw(3, 2, 8, 512, act="bfloat16")[..., 256:]
    factor = draw(3, 2, 2048, act="bfloat16", seed=1)
    got = native_layers.activation(Function.SIGMOID, heads, factor)
    check(got, formula(Function.SIGMOID, heads).flatten(2) * factor.double(), "bfloat16")


def test_an_activation_of_nan_is_nan() -> None:
    x = torch.full((1, 1, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
    for function in Function:
        assert native_layers.activation(function, x).isnan().all()


def test_a_captured_norm_reads_what_is_there_at_replay() -> None:
    x, weight = draw(4, 1, 2560, act="bfloat16"), draw(2560, act="bfloat16").float()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = native_layers.rms_norm(x, weight, EPS, unit_offset=True)
    x.copy_(draw(4, 1, 2560, act="bfloat16", seed=5))
    graph.replay()
    assert torch.equal(out, native_layers.rms_norm(x, weight, EPS, unit_offset=True))
