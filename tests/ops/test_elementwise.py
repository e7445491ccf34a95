"""Activations: near float64, finite at the extremes, and the same bits wherever an element stands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tolerance import FLOAT32_STEP
from trtllm_replayssm.ops.reference import elementwise, gdn, mamba2
from trtllm_replayssm.spec import ssm

PAIRS = [(elementwise.silu, ssm.silu), (elementwise.sigmoid, ssm.sigmoid), (elementwise.softplus, ssm.softplus)]


@pytest.mark.parametrize("ours,theirs", PAIRS, ids=["silu", "sigmoid", "softplus"])
def test_values_equal_float64(ours: Callable[[Tensor], Tensor], theirs: Callable[[np.ndarray], np.ndarray]) -> None:
    x = torch.cat([torch.linspace(-30, 30, 6001), torch.tensor([-100.0, -88.0, 88.0, 100.0, 3e38, -3e38, 0.0])])
    got, want = ours(x).double().numpy(), theirs(x.double().numpy())
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= 4 * FLOAT32_STEP * np.abs(want) + 1e-37).all()


@pytest.mark.parametrize("ours", [pair[0] for pair in PAIRS], ids=["silu", "sigmoid", "softplus"])
def test_an_element_has_the_same_bits_at_every_place(ours: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 67, generator=torch.Generator().manual_seed(0)) * 4
    whole = ours(x)
    for start in range(67):
        for stop in (start + 1, min(start + 9, 67), 67):
            assert torch.equal(ours(x[:, start:stop].contiguous()), whole[:, start:stop])


def test_gates_and_step_sizes_follow_the_model_equations() -> None:
    """g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), dt = softplus(dt + dt_bias) without a clamp (D07)."""
    g = torch.Generator().manual_seed(1)
    a, b, a_log, bias = (torch.randn(5, 4, generator=g) for _ in range(4))
    log_decay, beta = gdn.gates(a, b, a_log[0], bias[0])
    wide = [t.double().numpy() for t in (a, b, a_log[0], bias[0])]
    assert (log_decay < 0).all()
    np.testing.assert_allclose(log_decay.numpy(), -np.exp(wide[2]) * ssm.softplus(wide[0] + wide[3]), rtol=1e-6)
    np.testing.assert_allclose(beta.numpy(), ssm.sigmoid(wide[1]), rtol=1e-6)
    small = mamba2.discretise(torch.tensor([[-20.0, 0.0]]), torch.zeros(2))
    np.testing.assert_allclose(small.numpy(), [[np.log1p(np.exp(-20.0)), np.log(2.0)]], rtol=1e-6)
