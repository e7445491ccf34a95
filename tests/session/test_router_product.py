"""The split of a router's weights: exact, and no longer than it must be; its scores against float64 on a GPU."""

from __future__ import annotations

import pytest
import torch

from trtllm_replayssm.runtime.session.router_product import scores, split, with_row


def test_a_bfloat16_router_needs_one_part() -> None:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    parts = split(weight)
    assert parts.shape == (1, 8, 16) and torch.equal(parts[0].float(), weight)


def test_zeros_are_a_router_too() -> None:
    assert split(torch.zeros(4, 8)).shape == (1, 4, 8)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_a_float32_router_is_the_sum_of_three_parts(scale: float) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) * scale
    parts = split(weight)
    assert parts.shape[0] == 3 and parts.dtype is torch.bfloat16
    assert torch.equal(parts.double().sum(0), weight.double())


@pytest.mark.parametrize("experts", [7, 8, 12])
def test_a_row_behind_the_router_leaves_whole_groups_of_eight(experts: int) -> None:
    generator = torch.Generator().manual_seed(4)
    router, row = (torch.randn(count, 16, generator=generator) for count in (experts, 1))
    both = with_row(router, row)
    assert len(both) == -(-(experts + 1) // 8) * 8
    assert torch.equal(both[:experts], router) and torch.equal(both[experts], row[0]) and not both[experts + 1 :].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("exact", [True, False])
def test_scores_lose_far_less_than_the_rounding_of_their_inputs(exact: bool) -> None:
    """Tensor cores cut their sums off (1e-5 here), which is a hundredth of what bfloat16 activations are uncertain by;
    a router rounded to bfloat16 would be off by as much as these.
    """
    generator = torch.Generator("cuda").manual_seed(3)
    wide = torch.randn(64, 4096, device="cuda", generator=generator)
    x = wide.bfloat16()
    weight = torch.randn(512, 4096, device="cuda", generator=generator) / 64
    weight = weight.bfloat16().float() if exact else weight
    want = x.double() @ weight.double().t()
    error = (scores(x, split(weight)).double() - want).abs().max()
    uncertain = (wide.double() @ weight.double().t() - want).abs().max()
    assert error <= uncertain / 100
