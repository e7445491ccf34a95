"""The routing kernel against the specification in float64: the same experts in the same order, weights to a few float32
steps. Logits are far from ties but where a test makes exact ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.native import harness
from trtllm_replayssm.shapes import MoeShape, Router
from trtllm_replayssm.spec import layers

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable())),
    pytest.mark.usefixtures("installed_library"),
]  # fmt: skip

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.ops import native_experts
    from trtllm_replayssm.ops.layer_state import StepRows

# Accepts the float32 exponential and a sum of the chosen scores; rejects a weight over the wrong sum.
WEIGHT_STEPS = 16


def moe(experts: int, top_k: int, router: Router, **fields: Any) -> MoeShape:
    return MoeShape(
        experts=experts, top_k=top_k, intermediate=64, latent=None, shared_intermediate=64, gated=True,
        shared_gated=False, router=router, **fields,
    )  # fmt: skip


SHAPES = [
    moe(512, 22, Router.SIGMOID_BIAS, scaling=5.0),
    moe(256, 8, Router.SOFTMAX),
    moe(8, 2, Router.SOFTMAX, norm_topk=False),
    moe(64, 6, Router.SIGMOID_BIAS, n_group=8, topk_group=3, scaling=2.5),
    moe(40, 5, Router.SIGMOID_BIAS, n_group=5, topk_group=2),
    moe(1000, 32, Router.SIGMOID_BIAS),
    moe(3, 3, Router.SOFTMAX),
]


def rows_of(slot: list[int], num_tokens: list[int]) -> Any:
    return StepRows(torch.tensor(slot, device="cuda"), torch.tensor(num_tokens, device="cuda"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.router.value}-{s.experts}-top{s.top_k}-{s.n_group}groups")
def test_routes_as_the_specification(shape: MoeShape) -> None:
    rng = np.random.default_rng(shape.experts)
    rows, tokens = 5, 3
    # distinct steps of 1/64 in each token: no choice hangs on the last bits
    steps = np.stack([rng.permutation(shape.experts) for _ in range(rows * tokens)])
    logits = ((steps - shape.experts / 2) * (8 / shape.experts)).astype(np.float32)
    bias = None
    if shape.router is Router.SIGMOID_BIAS:
        bias = (rng.permutation(shape.experts) / shape.experts).astype(np.float32)
    slot, num_tokens = [4, -1, 0, 2, 3], [3, 3, 1, 0, 2]
    device_logits = torch.from_numpy(logits.reshape(rows, tokens, -1)).cuda()
    device_bias = None if bias is None else torch.from_numpy(bias).cuda()
    ids, weights = native_experts.route(device_logits, device_bias, shape, rows_of(slot, num_tokens))
    expected_ids, expected = layers.route(
        logits.astype(np.float64), None if bias is None else bias.astype(np.float64), shape
    )
    for place in range(rows * tokens):
        row, token = divmod(place, tokens)
        got_ids, got = ids[place].cpu().numpy(), weights[place].double().cpu().numpy()
        if slot[row] < 0 or token >= num_tokens[row]:
            assert (got_ids == -1).all() and not got.any()
            continue
        assert got_ids.tolist() == expected_ids[place].tolist()
        assert np.allclose(got, expected[place], rtol=WEIGHT_STEPS * 2.0**-24, atol=0)


@pytest.mark.parametrize("router", list(Router))
def test_ties_go_to_the_lower_expert(router: Router) -> None:
    shape = moe(96, 7, router)
    logits = torch.zeros((1, 1, 96), device="cuda")
    logits[0, 0, 40:] = 1.0
    logits[0, 0, 90] = 2.0
    ids, _ = native_experts.route(logits, None, shape, rows_of([0], [1]))
    assert ids[0].tolist() == [90, 40, 41, 42, 43, 44, 45]


@pytest.mark.parametrize(("kept", "expected"), [(1, [4, 5, 6, 7]), (2, [4, 5, 8, 9]), (3, [0, 4, 5, 8])])
def test_the_best_groups_win_and_ties_go_to_the_lower_group(kept: int, expected: list[int]) -> None:
    """Two best members of the four groups: 0.98 + 0.05, twice 0.73 + 0.73, 0.95 + 0.05."""
    shape = moe(16, 4, Router.SIGMOID_BIAS, n_group=4, topk_group=kept)
    logits = torch.full((1, 1, 16), -3.0, device="cuda")
    logits[0, 0, [0, 4, 5, 8, 9, 12]] = torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0, 3.0], device="cuda")
    ids, _ = native_experts.route(logits, None, shape, rows_of([0], [1]))
    assert ids[0].tolist() == expected
