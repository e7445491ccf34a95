"""Cases computed by hand: one head, tiny vectors, numbers that can be checked on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.spec.helpers import Sequence, small_shape
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec import layers, ssm
from trtllm_replayssm.spec.conv1d import conv_step
from trtllm_replayssm.spec.replay import StepInputs

HALF = math.log(0.5)


def one_head(kind: SsmKind) -> SsmShape:
    return small_shape(kind, heads=1, groups=1, head_dim=2, state_dim=2)


def test_mamba2_two_tokens_by_hand() -> None:
    """S = dt x k^T, o = S q; then the decay 0.5 comes before the second update.

    token 1: x (2, -1), k (1, 3), dt 0.5 -> S = [[1, 3], [-0.5, -1.5]]; q (1, 1) -> o (4, -2)
    token 2: alpha 0.5, x (4, 0), k (0, 1), dt 1 -> S = [[0.5, 5.5], [-0.25, -0.75]]; q (2, 1) -> o (6.5, -1.25)
    """
    inputs = StepInputs(
        k=np.array([[[1.0, 3.0]], [[0.0, 1.0]]]), q=np.array([[[1.0, 1.0]], [[2.0, 1.0]]]),
        value=np.array([[[2.0, -1.0]], [[4.0, 0.0]]]), log_decay=np.array([[-9.0], [HALF]]),
        dt=np.array([[0.5], [1.0]]),
    )  # fmt: skip
    want = [[[4.0, -2.0]], [[6.5, -1.25]]]
    final = [[[0.5, 5.5], [-0.25, -0.75]]]
    for split in ([2], [1, 1]):
        sequence = Sequence.new(one_head(SsmKind.MAMBA2), ReplayConfig(window=2, max_step_tokens=2), exact=True)
        np.testing.assert_allclose(sequence.run(inputs, split), want, rtol=1e-14)
        np.testing.assert_allclose(sequence.state(), final, rtol=1e-14)
    state = np.zeros((1, 2, 2))
    for t, a in enumerate([-18.0, HALF]):
        out, state = ssm.mamba2_step(
            one_head(SsmKind.MAMBA2), state, inputs.value[t], inputs.k[t], inputs.q[t], inputs.dt[t], np.array([a])
        )
        np.testing.assert_allclose(out, want[t], rtol=1e-14)
    np.testing.assert_allclose(state, final, rtol=1e-14)


def test_gdn_two_tokens_by_hand() -> None:
    """Keys are normalised, queries normalised and divided by sqrt(2); the state decays before the key reads it.

    token 1: k (3, 4) -> (0.6, 0.8), v (2, 1), beta 0.5 -> u (1, 0.5), S = [[0.6, 0.8], [0.3, 0.4]]
             q (0, 5) -> (0, 1) / sqrt 2 -> o = (0.8, 0.4) / sqrt 2
    token 2: alpha 0.5, k (2, 0) -> (1, 0): decayed S k = (0.3, 0.15); v (1.3, 0.15), beta 1 -> u (1, 0)
             S = [[1.3, 0.4], [0.15, 0.2]]; q (1, 0) / sqrt 2 -> o = (1.3, 0.15) / sqrt 2
    """
    inputs = StepInputs(
        k=np.array([[[3.0, 4.0]], [[2.0, 0.0]]]), q=np.array([[[0.0, 5.0]], [[1.0, 0.0]]]),
        value=np.array([[[2.0, 1.0]], [[1.3, 0.15]]]), log_decay=np.array([[-9.0], [HALF]]),
        beta=np.array([[0.5], [1.0]]),
    )  # fmt: skip
    want = np.array([[[0.8, 0.4]], [[1.3, 0.15]]]) / math.sqrt(2.0)
    final = [[[1.3, 0.4], [0.15, 0.2]]]
    for split in ([2], [1, 1]):
        sequence = Sequence.new(one_head(SsmKind.GDN), ReplayConfig(window=2, max_step_tokens=2), exact=True)
        np.testing.assert_allclose(sequence.run(inputs, split), want, rtol=2e-6)  # the norm's epsilon is 1e-6
        np.testing.assert_allclose(sequence.state(), final, rtol=2e-6)
    state = np.zeros((1, 2, 2))
    for t in range(2):
        out, state = ssm.gdn_step(
            one_head(SsmKind.GDN), state, inputs.k[t], inputs.q[t], inputs.value[t],
            inputs.log_decay[t], inputs.beta[t],
        )  # fmt: skip
        np.testing.assert_allclose(out, want[t], rtol=2e-6)
    np.testing.assert_allclose(state, final, rtol=2e-6)


def test_a_key_of_zeros_gives_the_factor_of_the_epsilon() -> None:
    assert ssm.l2_norm_factor(np.zeros(4)) == pytest.approx(1000.0)


@pytest.mark.parametrize("kind", list(SsmKind))
def test_a_gate_of_the_wrong_sign_or_scale_changes_the_output(kind: SsmKind) -> None:
    """The decay is given as a logarithm: passing alpha itself, or the logarithm with a plus sign, is another result."""
    shape = one_head(kind)
    outputs = []
    for decay in (HALF, 0.5, -HALF):
        sequence = Sequence.new(shape, ReplayConfig(window=4), exact=True)
        inputs = StepInputs(
            k=np.ones((2, 1, 2)), q=np.ones((2, 1, 2)), value=np.ones((2, 1, 2)),
            log_decay=np.full((2, 1), decay), dt=np.ones((2, 1)), beta=np.full((2, 1), 0.5),
        )  # fmt: skip
        outputs.append(sequence.run(inputs, [1, 1])[1])
    assert not np.allclose(outputs[0], outputs[1]) and not np.allclose(outputs[0], outputs[2])


def test_consecutive_value_heads_share_a_key_head() -> None:
    shape = small_shape(SsmKind.GDN, heads=4, groups=2, state_dim=1)
    assert ssm.to_heads(shape, np.array([[1.0], [2.0]])).ravel().tolist() == [1.0, 1.0, 2.0, 2.0]


def test_convolution_by_hand() -> None:
    """Kernel 3 over inputs 1, 2, 3 with taps (10, 20, 30) oldest first: 30, 80, 140, plus the bias 1."""
    window = np.full((3, 1), np.nan)
    x = np.array([[1.0], [2.0], [3.0]])
    out = conv_step(window, 0, x, np.array([[[10.0, 20.0, 30.0]]]), np.array([1.0]))
    np.testing.assert_allclose(out[:, 0], [31.0, 81.0, 141.0])  # SiLU is the identity for such values
    np.testing.assert_allclose(
        conv_step(np.full((3, 1), np.nan), 0, x[:1] / 30.0, np.array([[[9.0, 9.0, 30.0]]]), None)[0, 0],
        1.0 / (1.0 + math.exp(-1.0)),
    )


def test_norms_by_hand() -> None:
    x = np.array([[3.0, 4.0]])
    np.testing.assert_allclose(layers.rms_norm(x, np.array([1.0, 2.0]), 0.0), [[3.0, 8.0]] / np.sqrt(12.5))
    silu1 = 1.0 / (1.0 + math.exp(-1.0))
    gate_first = layers.gated_rms_norm(
        np.array([[1.0, 2.0]]), np.ones((1, 2)), np.array([1.0, 2.0]), 0.0, groups=2, gate_first=True
    )
    np.testing.assert_allclose(gate_first, [[1.0, 2.0]])  # each group of one channel has norm one
    norm_first = layers.gated_rms_norm(
        np.array([[3.0, 4.0, 4.0, 3.0]]), np.ones((1, 4)), np.array([1.0, 2.0]), 0.0, groups=2, gate_first=False
    )
    np.testing.assert_allclose(norm_first, silu1 * np.array([[3.0, 8.0, 4.0, 6.0]]) / np.sqrt(12.5))


def test_rope_turns_the_pairs_of_the_first_dims_by_position() -> None:
    x = np.array([[[1.0, 0.0, 0.0, 1.0, 7.0]]])
    out = layers.rope(x, np.array([2.0]), 4, 100.0)[0, 0]
    np.testing.assert_allclose(out, [math.cos(2.0), -math.sin(0.2), math.sin(2.0), math.cos(0.2), 7.0])


def test_attention_by_hand() -> None:
    """Scores (0, ln 3): weights 1/4 and 3/4; the earlier query sees the first key only."""
    q = np.array([[[5.0]], [[1.0]]])
    keys, values = np.array([[[0.0]], [[math.log(3.0)]]]), np.array([[[8.0]], [[4.0]]])
    np.testing.assert_allclose(layers.attention(q, keys, values)[:, 0, 0], [8.0, 5.0])
