"""Products without a workspace: the bits of torch's, in a graph and outside, and no memset beside them."""

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


def test_only_large_contiguous_products_are_served(products: Any) -> None:
    x, weight = draw(1024, 2560, dtype=torch.bfloat16), draw(8192, 2560, dtype=torch.bfloat16)
    assert products.serve(x, weight)
    assert not products.serve(x[:512], weight) and not products.serve(x.cpu(), weight.cpu())
    assert not products.serve(x.t().contiguous().t(), weight) and not products.serve(x.float(), weight.float())
    small = functional.linear(x[:4], weight)
    assert small.shape == (4, 8192), "torch's own handle still works"
