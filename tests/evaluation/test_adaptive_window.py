"""The window per row: the policy's choices, and its bytes against fixed windows by the traffic model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trtllm_replayssm.bench.cases import kernel_shapes
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.spec.adaptive_window import AdaptiveWindow, simulate
from trtllm_replayssm.spec.traffic import best_window, window_bytes_per_token

SHAPE = kernel_shapes()["super120b"]
CONFIG = ReplayConfig(window=64, max_step_tokens=8)


def test_the_policy_takes_the_best_window_of_the_recent_mean() -> None:
    policy = AdaptiveWindow.for_shape(SHAPE, CONFIG, 8, horizon=4)
    assert policy([]) == best_window(SHAPE, CONFIG, 8, 8.0)
    assert policy([8] * 50 + [1] * 4) == best_window(SHAPE, CONFIG, 8, 1.0)
    assert policy([1, 2, 1, 2]) == best_window(SHAPE, CONFIG, 8, 1.5)
    assert policy([0, 0, 0, 0]) == policy([1]), "steps that commit nothing are below the table"
    assert policy.windows[0] < policy.windows[12] < policy.windows[-2], "more acceptance, longer windows"


def test_windows_never_exceed_the_ring() -> None:
    assert max(AdaptiveWindow.for_shape(SHAPE, replace(CONFIG, window=12), 8).windows) == 12


@pytest.mark.parametrize("window", [8, 16, 24])
def test_a_fixed_policy_moves_what_the_traffic_model_says(window: int) -> None:
    steady = window_bytes_per_token(SHAPE, replace(CONFIG, window=window), 8, 2.0)
    assert simulate(SHAPE, CONFIG, 8, [2] * 20000, lambda _: window) == pytest.approx(steady, rel=1e-3)


def test_following_the_acceptance_beats_any_one_window_when_it_changes() -> None:
    rng = np.random.default_rng(0)
    accepted = np.concatenate([rng.integers(1, 3, 400), rng.integers(7, 9, 400)] * 3).tolist()
    adaptive = simulate(SHAPE, CONFIG, 8, accepted, AdaptiveWindow.for_shape(SHAPE, CONFIG, 8))
    fixed = min(simulate(SHAPE, CONFIG, 8, accepted, lambda _, w=w: w) for w in range(8, 65, 2))
    assert adaptive < fixed
