"""Products without a workspace: exact up to rounding, in a graph and outside, no memset beside them; and in parts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.native import harness

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch
    from torch.nn import functional

    from trtllm_replayssm.bench.rounding import TYPES, step
    from trtllm_replayssm.ops.large_products import LargeProducts


@pytest.fixture(scope="module")
def products() -> Any:
    return LargeProducts.on(torch.device("cuda", torch.cuda.current_device()))


def draw(*shape: int, dtype: Any) -> Any:
    return torch.randn(shape, dtype=dtype, device="cuda") * shape[-1] ** -0.25


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("batch", "tokens", "width", "inner"), [(256, 4, 18432, 2560), (1, 700, 12352, 320)])
def test_products_are_exact_up_to_the_rounding(
    products: Any, batch: int, tokens: int, width: int, inner: int, dtype: str
) -> None:
    act = getattr(torch, dtype)
    x, weight = draw(batch, tokens, inner, dtype=act), draw(width, inner, dtype=act)
    assert products.serve(x, weight)
    rounded, sums = products.linear(x, weight), products.linear(x, weight, torch.float32)
    exact = x[0, :2].double() @ weight.double().t()
    noise = inner * 2.0**-23 * (x[0, :2].abs().double() @ weight.abs().double().t())  # of float32 sums in any order
    assert ((sums[0, :2].double() - exact).abs() <= noise).all()
    half = 0.5 * step(exact.abs() + noise, TYPES[act])
    assert ((rounded[0, :2].double() - exact).abs() <= noise + half).all(), "one rounding"
    torchs = torch.mm(x.flatten(0, 1), weight.t(), out_dtype=torch.float32).view_as(sums)
    assert (sums - torchs).abs().max() <= 2 * noise.max()


def test_a_graph_has_products_alone(products: Any) -> None:
    x, weight = draw(256, 4, 2560, dtype=torch.bfloat16), draw(18432, 2560, dtype=torch.bfloat16)
    eager = products.linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products.linear(x, weight)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type.name == "CUDA"]
    assert len(names) == 1 and "emset" not in names[0], names
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("batch", "tokens", "width", "inner"), [(256, 1, 2560, 9216), (50, 3, 3136, 7680)])
def test_parts_are_sums_over_shares_of_the_inputs(
    products: Any, batch: int, tokens: int, width: int, inner: int, dtype: str
) -> None:
    act = getattr(torch, dtype)
    x, weight = draw(batch, tokens, inner, dtype=act), draw(width, inner, dtype=act)
    count = products.parts_of(x, weight)
    assert count == 2
    parts, share = products.parts(x, weight, count), inner // count
    assert parts.shape == (count, batch, tokens, width) and parts.dtype is torch.float32
    for i, part in enumerate(parts):
        own = slice(i * share, (i + 1) * share)
        exact = x[:, 0, own].double() @ weight[:, own].double().t()
        noise = share * 2.0**-23 * (x[:, 0, own].abs().double() @ weight[:, own].abs().double().t())
        assert ((part[:, 0].double() - exact).abs() <= noise).all()


def test_products_of_many_results_or_few_inputs_stay_whole(products: Any) -> None:
    x, weight = draw(257, 9216, dtype=torch.bfloat16), draw(4104, 9216, dtype=torch.bfloat16)
    assert products.parts_of(x[:256], weight[:4096]) == products.parts_of(x[:1], weight[:2560]) == 2
    assert products.parts_of(x, weight[:2560]) == products.parts_of(x[:256], weight) == 1
    short, thin = x[:8, :2560].contiguous(), weight[:64, :2560].contiguous()
    assert products.parts_of(short, thin) == products.parts_of(x[:8, :4096], weight[:64, :4096]) == 1
    assert products.parts_of(x[:8].cpu(), weight[:64].cpu()) == products.parts_of(x[:8].half(), weight[:64]) == 1


def test_only_large_contiguous_products_are_served(products: Any) -> None:
    x, weight = draw(1024, 2560, dtype=torch.bfloat16), draw(8192, 2560, dtype=torch.bfloat16)
    assert products.serve(x, weight)
    assert not products.serve(x[:512], weight) and not products.serve(x.cpu(), weight.cpu())
    assert not products.serve(x.t().contiguous().t(), weight) and not products.serve(x.float(), weight.float())
    small = functional.linear(x[:4], weight)
    assert small.shape == (4, 8192), "torch's own handle still works"
