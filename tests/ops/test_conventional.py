"""The conventional operations against the specification's recurrence, with a snapshot per drafted token.

Oracle O1 for outputs and for every snapshot; the bound is the same formula in plain float32 (the conventional
operation is that formula, so one float32 step of the largest value per token of the run).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import KINDS, Layer, Tokens, random_tokens
from tests.tolerance import RECURRENCE_NOISE
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec import ssm

Array = np.ndarray


def recurrence(shape: SsmShape, layer: Layer, tokens: Tokens, row: int = 0) -> tuple[Array, list[Array]]:
    """Outputs [T, H, P] with the skip, and the state before and after each token, float64."""
    k, q, value, decay = (t[row].double().numpy() for t in (tokens.k, tokens.q, tokens.value, tokens.decay))
    states = [np.zeros((shape.heads, shape.head_dim, shape.state_dim))]
    outputs = []
    for t in range(len(k)):
        if shape.kind is SsmKind.MAMBA2:
            rate, skip = layer.a.double().numpy(), layer.d_skip.double().numpy()
            out, state = ssm.mamba2_step(shape, states[-1], value[t], k[t], q[t], decay[t], rate)
            out = out + skip[:, None] * value[t]
        else:
            assert tokens.beta is not None
            beta = tokens.beta[row].double().numpy()
            out, state = ssm.gdn_step(shape, states[-1], k[t], q[t], value[t], decay[t], beta[t])
        outputs.append(out)
        states.append(state)
    return np.array(outputs), states


def assert_near(got: torch.Tensor, want: Array) -> None:
    assert np.abs(got.double().numpy() - want).max() <= RECURRENCE_NOISE * np.abs(want).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_states_equal_the_recurrence(kind: SsmKind, dtype: torch.dtype) -> None:
    shape = ssm_shape(kind)
    layer = Layer(shape, ReplayConfig(window=8, max_step_tokens=4), conventional=True)
    tokens = random_tokens(shape, 1, 40, dtype=dtype)
    want, states = recurrence(shape, layer, tokens)
    assert_near(layer.run(tokens, [4, 1, 3, 2] * 4)[0], want)
    assert_near(layer.fold(0), states[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rolled_back_step_continues_from_the_last_accepted_token(kind: SsmKind) -> None:
    shape = ssm_shape(kind)
    for kept in range(5):
        layer = Layer(shape, ReplayConfig(window=8, max_step_tokens=4), 3, conventional=True)
        tokens, others = random_tokens(shape, 1, 12), random_tokens(shape, 1, 4, seed=9)
        want, states = recurrence(shape, layer, tokens)
        layer.step(tokens.span(0, 3), [2])
        mixed = others.map(torch.clone)
        for target, source in zip(vars(mixed).values(), vars(tokens).values(), strict=True):
            if target is not None:
                target[:, :kept] = source[:, 3 : 3 + kept]
        layer.step(mixed, [2], accepted=[kept])
        assert_near(layer.fold(2), states[3 + kept])
        assert int(layer.cursors.position[2]) == 3 + kept
        assert_near(layer.run(tokens.span(3 + kept, 12), [3] * ((9 - kept) // 3) + [1] * ((9 - kept) % 3), [2])[0],
                    want[3 + kept :])  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_idle_rows_change_nothing(kind: SsmKind) -> None:
    shape = ssm_shape(kind)
    layer = Layer(shape, ReplayConfig(window=8, max_step_tokens=3), 4, conventional=True)
    assert layer.conventional is not None
    layer.step(random_tokens(shape, 4, 3), range(4))
    before = layer.conventional.states.clone()
    out = layer.step(random_tokens(shape, 4, 3, seed=1), [1, -1, 3, 0], [0, 3, 2, 0])
    assert torch.equal(layer.conventional.states[:3], before[:3])
    assert not torch.equal(layer.conventional.states[3], before[3])
    assert (out[[0, 1, 3]] == 0).all() and (out[2, 2] == 0).all() and (out[2, :2] != 0).any()
    assert [layer.cursor(s)[2] for s in range(4)] == [3, 3, 3, 5]
