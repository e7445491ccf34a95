"""Replay: drift, checkpoints after each flush, boundaries, acceptance counts (A05, A07, A09, A12, A16, A23, A24, D02,
D07, D08, D11).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import KINDS, Layer, Tokens, noise, random_tokens, rates, same
from tests.ops.test_conventional import recurrence
from tests.ops.test_prefill import scan
from tests.spec.helpers import even_split
from tests.tolerance import FLOAT32_STEP
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ConfigError, ContractError
from trtllm_replayssm.shapes import SsmKind


def small(kind: SsmKind) -> Layer:
    return Layer(ssm_shape(kind, heads=2, groups=1, head_dim=4, state_dim=8), ReplayConfig(window=8, max_step_tokens=4))


@pytest.mark.parametrize("kind", KINDS)
def test_a05_the_state_error_does_not_grow_with_length(kind: SsmKind) -> None:
    """A05: 8,192 verified tokens, heads that remember up to 500 of them, against the float64 recurrence."""
    shape = ssm_shape(kind, heads=2, groups=1, head_dim=2, state_dim=8)
    layer = Layer(shape, ReplayConfig(window=16, max_step_tokens=16), poisoned=False)
    tokens = random_tokens(shape, 1, 8192, slowest=0.002)
    layer.a = rates(shape, 0.002)
    _, states = recurrence(shape, layer, tokens)
    errors: dict[int, float] = {}
    for start in range(0, 8192, 16):
        layer.step(tokens.span(start, start + 16))
        truth = states[start + 16]
        error = np.abs(layer.fold(0).double().numpy() - truth).max() / np.abs(truth).max()
        for length in (64, 1024, 8192):
            if length - 64 < start + 16 <= length:
                errors[length] = max(errors.get(length, 0.0), float(error))
    assert errors[8192] <= 2 * max(errors[1024], errors[64]) and errors[8192] <= noise(kind), errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3])
def test_a07_every_flushed_checkpoint_equals_the_sequential_state_head_by_head(kind: SsmKind, width: int) -> None:
    """A07: the checkpoint itself after each flush; each head has its own gate, so each is compared on its own scale."""
    shape = ssm_shape(kind)
    layer = Layer(shape, ReplayConfig(window=5, max_step_tokens=3))
    tokens = random_tokens(shape, 1, 60)
    _, states = recurrence(shape, layer, tokens)
    flushes = 0
    for start in range(0, 60, width):
        _, h, position = layer.cursor(0)
        layer.step(tokens.span(start, start + width))
        if h + width > 5:
            flushes += 1
            stored = layer.state.checkpoint.load(torch.tensor([0]))[0].double().numpy()
            for head in range(shape.heads):
                error = np.abs(stored[head] - states[position][head]).max()
                assert error <= noise(kind) * np.abs(states[position][head]).max()
    assert flushes >= 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("h", [0, 2, 5, 6])
def test_a09_the_state_kept_is_that_of_the_accepted_token_on_either_side_of_a_boundary(kind: SsmKind, h: int) -> None:
    """A09: T = 4 with a window that ends between the second and third token (h = 6 of 8), or before; a = 0..4."""
    for accepted in range(5):
        layer = small(kind)
        tokens = random_tokens(layer.shape, 1, h + 12)
        _, states = recurrence(layer.shape, layer, tokens)
        layer.run(tokens.span(0, h), [1] * h) if h else None
        layer.step(tokens.span(h, h + 4), accepted=[accepted])
        state, truth = layer.fold(0).double().numpy(), states[h + accepted]
        assert np.abs(state - truth).max() <= noise(kind) * np.abs(states[-1]).max()
        assert layer.cursor(0)[2] == h + accepted


@pytest.mark.parametrize("kind", KINDS)
def test_a12_the_base_token_is_always_committed(kind: SsmKind) -> None:
    """A12: k accepted drafts commit k + 1 records and positions; no accepted draft commits the base alone."""
    for drafts in range(4):
        layer = small(kind)
        tokens = random_tokens(layer.shape, 1, 4)
        layer.step(tokens, accepted=[drafts + 1])
        assert layer.cursor(0) == (0, drafts + 1, drafts + 1)
        alone = small(kind)
        alone.run(tokens.span(0, drafts + 1), [1] * (drafts + 1))
        assert same(layer.committed(0), alone.committed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a16_impossible_acceptances_are_clamped_and_touch_no_other_slot(kind: SsmKind) -> None:
    """A16: a = 0, -1, T + 1 and a stale count in a padded row; the next step still equals the recurrence."""
    layer = Layer(small(kind).shape, ReplayConfig(window=8, max_step_tokens=4), 5)
    layer.poison()
    tokens = random_tokens(layer.shape, 4, 8)
    untouched = layer.everything(4)
    layer.step(tokens.span(0, 4), [0, 1, 2, -1], [4, 4, 4, 4], [0, -1, 5, 2**30])
    assert [layer.cursor(s)[2] for s in range(5)] == [0, 0, 4, 0, 0]
    out = layer.step(tokens.span(4, 8), [0, 1, 2, -1], [4, 4, 4, 4])
    assert same(layer.everything(4), untouched)
    for row, skipped in ((0, 4), (1, 4), (2, 0)):
        want, _ = recurrence(layer.shape, layer, tokens.span(skipped, 8), row)
        assert np.abs(out[row].numpy() - want[-4:]).max() <= noise(kind) * np.abs(want).max()
    assert (out[3] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", range(1, 10))
def test_a23_every_step_size_up_to_the_limit_is_right_and_one_more_is_refused(kind: SsmKind, width: int) -> None:
    """A23: T = 1..9 with L = T, the tightest pool; T + 1 is an error before anything runs."""
    shape = small(kind).shape
    layer = Layer(shape, ReplayConfig(window=width, max_step_tokens=width))
    tokens = random_tokens(shape, 1, 4 * width + 1)
    want, _ = recurrence(shape, layer, tokens)
    got = layer.run(tokens.span(0, 4 * width), [width] * 4)
    assert np.abs(got[0].numpy() - want[: 4 * width]).max() <= noise(kind) * np.abs(want).max()
    with pytest.raises(ContractError, match=f"T_max = {width}"):
        layer.step(tokens.span(0, width + 1))
    with pytest.raises(ConfigError, match=f"T_max = {width + 1} > L = {width}"):
        ReplayConfig(window=width, max_step_tokens=width + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a24_a_length_that_ends_exactly_on_the_boundary_is_right(kind: SsmKind, width: int) -> None:
    """A24: h + T exactly L, and the position exactly on the border of a window after a = 1..T; then goes on."""
    for accepted in range(1, width + 1):
        for before in (8 - width, 8 - accepted):
            layer = Layer(small(kind).shape, ReplayConfig(window=8, max_step_tokens=4))
            tokens = random_tokens(layer.shape, 1, 30)
            want, states = recurrence(layer.shape, layer, tokens)
            layer.run(tokens.span(0, before), [1] * before)
            layer.step(tokens.span(before, before + width), accepted=[accepted])
            at = before + accepted
            rest = layer.run(tokens.span(at, 30), even_split(30 - at, 4))
            assert np.abs(rest[0].numpy() - want[at:]).max() <= noise(kind) * np.abs(want).max()
            assert np.abs(layer.fold(0).numpy() - states[-1]).max() <= noise(kind) * np.abs(states[-1]).max()


def drift(kind: SsmKind, fmt: StateFormat, rounding: Rounding, window: int, length: int) -> float:
    """Mean state error of a slowly forgetting head over the last quarter of a run, relative to the state."""
    shape = ssm_shape(kind, heads=2, groups=1, head_dim=4, state_dim=16)
    config = ReplayConfig(
        window=window, max_step_tokens=min(window, 8), recurrence=fmt, recurrence_rounding=rounding
    )  # fmt: skip
    layer, exact = Layer(shape, config, poisoned=False), Layer(shape, ReplayConfig(), conventional=True)
    layer.a = exact.a = torch.full((2,), -0.004)
    tokens = random_tokens(shape, 1, length)
    if kind is SsmKind.GDN:
        tokens.decay[:] = -0.004
    errors = []
    width = config.max_step_tokens
    for start in range(0, length, width):
        for each in (layer, exact):
            each.run(tokens.span(start, start + width), [width] if each is layer else [1] * width)
        if start >= 3 * length // 4 and start % 16 == 16 - width:
            errors.append(float((layer.fold(0) - exact.fold(0)).norm() / exact.fold(0).norm()))
    return float(np.mean(errors))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", [StateFormat.FP8, StateFormat.NVFP4])
def test_d02_a_window_rounds_less_often_and_drifts_less(kind: SsmKind, fmt: StateFormat) -> None:
    """D02: 512 tokens, SR and nearest, a rounding at each token (L = 1) and at every eighth (L = 16, T = 8).

    No combination is refused: the formats are the caller's choice, and the numbers are printed.
    """
    found = {(mode, window): drift(kind, fmt, mode, window, 512) for mode in Rounding for window in (1, 16)}
    print(f"{kind.value} {fmt.value}: " + ", ".join(f"{r.value} L={w} {e:.4f}" for (r, w), e in found.items()))
    for mode in Rounding:
        assert 0 < 2 * found[mode, 16] < found[mode, 1] < math.inf


def test_d07_one_and_two_tokens_of_mamba2_by_hand() -> None:
    """D07: x = 2, k = 3, q = 0.5, dt = 0.5, a = -2 ln 2, D = 0.25; so alpha = 0.5 and dt x k = 3.

    S1 = 3, o1 = 1.5 + 0.5 = 2; the same token again: S2 = 0.5 * 3 + 3 = 4.5, o2 = 2.25 + 0.5 = 2.75.
    """
    shape = ssm_shape(SsmKind.MAMBA2, heads=1, groups=1, head_dim=1, state_dim=1)
    one = torch.ones(1, 2, 1, 1)
    tokens = Tokens(3 * one, 0.5 * one, 2 * one, torch.full((1, 2, 1), 0.5), None)
    for conventional in (False, True):
        for split in ([1, 1], [2]):
            layer = Layer(shape, ReplayConfig(window=2, max_step_tokens=2), conventional=conventional)
            layer.a, layer.d_skip = torch.tensor([-2 * math.log(2.0)]), torch.tensor([0.25])
            out = layer.run(tokens, split)
            torch.testing.assert_close(out.flatten(), torch.tensor([2.0, 2.75]))
            torch.testing.assert_close(layer.fold(0).flatten(), torch.tensor([4.5]))
    outputs, state = scan(shape, tokens, [2], torch.tensor([-2 * math.log(2.0)]))
    torch.testing.assert_close(outputs.flatten(), torch.tensor([1.5, 2.25]))
    torch.testing.assert_close(state.flatten(), torch.tensor([4.5]))


def test_d07_one_and_two_tokens_of_gdn_by_hand() -> None:
    """D07: k and q have length 5 and point along (0.6, 0.8); v = 4, beta = 0.5, gate ln 0.5, a log and not a factor.

    u1 = 0.5 * 4 = 2, S1 = 2 k^T, o1 = 2 / sqrt 2; u2 = 0.5 (4 - 0.5 * 2) = 1.5, S2 = (1 + 1.5) k^T, o2 = 2.5 / sqrt 2.
    """
    shape = ssm_shape(SsmKind.GDN, heads=1, groups=1, head_dim=1, state_dim=2)
    key = torch.tensor([3.0, 4.0]).expand(1, 2, 1, 2).contiguous()
    gate, beta = torch.full((1, 2, 1), math.log(0.5)), torch.full((1, 2, 1), 0.5)
    tokens = Tokens(key, key.clone(), torch.full((1, 2, 1, 1), 4.0), gate, beta)
    want_out, want_state = torch.tensor([2.0, 2.5]) / math.sqrt(2.0), 2.5 * torch.tensor([0.6, 0.8])
    for conventional in (False, True):
        for split in ([1, 1], [2]):
            layer = Layer(shape, ReplayConfig(window=2, max_step_tokens=2), conventional=conventional)
            torch.testing.assert_close(layer.run(tokens, split).flatten(), want_out)
            torch.testing.assert_close(layer.fold(0).flatten(), want_state)
    outputs, state = scan(shape, tokens, [2])
    torch.testing.assert_close(outputs.flatten(), want_out)
    torch.testing.assert_close(state.flatten(), want_state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_decay", [-np.inf, math.log(1e-12), -700.0])
def test_d08_a_decay_of_zero_stays_finite_in_steps(kind: SsmKind, log_decay: float) -> None:
    """D08: one head forgets everything at each of L tokens, all heads at one of them, with h = L - 1 waiting."""
    layer = small(kind)
    tokens = random_tokens(layer.shape, 1, 24)
    if kind is SsmKind.MAMBA2:
        layer.a[0] = log_decay
        tokens.decay[0, 12] = 1e4  # underflows to alpha = 0 in the other head too
    else:
        tokens.decay[0, :, 0] = log_decay
        tokens.decay[0, 12] = log_decay
    want, states = recurrence(layer.shape, layer, tokens)
    for split in ([1] * 24, [4] * 6, [1] * 7 + [4, 4, 1, 4, 4]):
        layer.cursors.h[0] = layer.cursors.origin[0] = layer.cursors.position[0] = 0
        layer.state.checkpoint.clear(0)
        out = layer.run(tokens, split)
        assert out.isfinite().all() and layer.fold(0).isfinite().all()
        assert np.abs(out[0].numpy() - want).max() <= max(noise(kind), 8 * FLOAT32_STEP) * np.abs(want).max()
        assert np.abs(layer.fold(0).numpy() - states[-1]).max() <= noise(kind) * np.abs(states[-1]).max()


@pytest.mark.parametrize("kind", KINDS)
def test_d11_consecutive_value_heads_share_a_key_head(kind: SsmKind) -> None:
    """D11: HV = 2 H. With the second key head silent, value heads 2, 3 are silent; i % H would silence 1, 3."""
    shape = ssm_shape(kind, heads=4, groups=2, head_dim=4, state_dim=8)
    tokens = random_tokens(shape, 1, 12)
    tokens.k[:, :, 1] = 0.0
    outputs = [scan(shape, tokens, [12])[0]]
    for conventional in (False, True):
        layer = Layer(shape, ReplayConfig(window=4, max_step_tokens=3), conventional=conventional)
        layer.d_skip.zero_()
        outputs.append(layer.run(tokens, [3] * 4)[0])
        assert [bool((layer.fold(0)[h] != 0).any()) for h in range(4)] == [True, True, False, False]
    for out in outputs:
        assert [bool((out[:, h] != 0).any()) for h in range(4)] == [True, True, False, False]
