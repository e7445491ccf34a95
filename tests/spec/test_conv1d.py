"""The convolution window: a ring that rolls back by position alone."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.spec.conv1d import conv_prefill, conv_step
from trtllm_replayssm.spec.ssm import silu

CHANNELS = 3


def direct(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The convolution as numpy does it: one full convolution per channel, cut to the causal part."""
    out = np.stack([np.convolve(x[:, c], weight[c, 0, ::-1])[: len(x)] for c in range(x.shape[1])], axis=1)
    return silu(out if bias is None else out + bias)


def random_case(taps: int, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(taps)
    return rng.normal(size=(tokens, CHANNELS)), rng.normal(size=(CHANNELS, 1, taps)), rng.normal(size=CHANNELS)


def fresh(taps: int, step_tokens: int) -> np.ndarray:
    rows = ReplayConfig(window=16, max_step_tokens=step_tokens).conv_rows(taps)
    return np.full((rows, CHANNELS), np.nan)  # taps before position 0 must be masked, not multiplied by zero


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_split_equals_the_direct_convolution(taps: int, with_bias: bool) -> None:
    x, weight, bias = random_case(taps, 23)
    used = bias if with_bias else None
    want = direct(x, weight, used)
    for step in (1, 2, 5):
        window, parts = fresh(taps, step), []
        for start in range(0, 23, step):
            parts.append(conv_step(window, start, x[start : start + step], weight, used))
        np.testing.assert_allclose(np.concatenate(parts), want, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(conv_prefill(fresh(taps, 1), 0, x, weight, used), want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 2, 3, 22, 23])
def test_prompt_chunks_shorter_than_the_kernel_keep_the_taps(chunk: int) -> None:
    x, weight, bias = random_case(4, 23)
    window, parts = fresh(4, 3), []
    for start in range(0, 23, chunk):
        parts.append(conv_prefill(window, start, x[start : start + chunk], weight, bias))
    np.testing.assert_allclose(np.concatenate(parts), direct(x, weight, bias), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("tokens", [1, 2, 4, 6])
def test_rejected_inputs_leave_no_trace(tokens: int) -> None:
    """After any acceptance, plain and multi-token steps give what the accepted tokens alone give, bit for bit."""
    x, weight, bias = random_case(4, 40)
    for accepted in range(tokens + 1):
        window, clean = fresh(4, 6), fresh(4, 6)
        position = 0
        for start in range(0, 12, 3):
            conv_step(window, start, x[start : start + 3], weight, bias)
            conv_step(clean, start, x[start : start + 3], weight, bias)
            position = start + 3
        drafts = np.concatenate([x[position : position + accepted], np.full((tokens - accepted, CHANNELS), 1e9)])
        kept = conv_step(window, position, drafts, weight, bias)[:accepted]
        assert np.array_equal(kept, conv_step(clean, position, x[position : position + accepted], weight, bias))
        position += accepted
        for size in (1, 6, 2):
            step = x[position : position + size]
            assert np.array_equal(
                conv_step(window, position, step, weight, bias), conv_step(clean, position, step, weight, bias)
            )
            position += size


def test_a_window_one_row_too_short_would_be_noticed() -> None:
    x, weight, bias = random_case(4, 12)
    window = np.full((3 + 4 - 1, CHANNELS), np.nan)
    conv_step(window, 0, x[:4], weight, bias)
    conv_step(window, 4, np.full((4, CHANNELS), 1e9), weight, bias)  # all rejected; row 1 was a tap of position 4
    assert not np.allclose(conv_step(window, 4, x[4:5], weight, bias), direct(x, weight, bias)[4:5])
