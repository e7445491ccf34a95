"""What a window per row, and skipping faded checkpoints, would save by the traffic model. No checkpoint, no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trtllm_replayssm.config import MAX_WINDOW, ReplayConfig
from trtllm_replayssm.runtime.evaluation.decays import THRESHOLDS, saving_by_decay
from trtllm_replayssm.shapes import SsmShape
from trtllm_replayssm.spec.adaptive_window import AdaptiveWindow, simulate
from trtllm_replayssm.spec.traffic import best_window

STEPS = 600  # of each row: with fewer the mean bytes of two seeds differ by more than what is compared
# name -> probability that a draft is accepted, by thirds of a row's life, for each row
SCENARIOS: dict[str, Sequence[Sequence[float]]] = {
    "every row accepts 80 %": [[0.8, 0.8, 0.8]],
    "rows accept 30, 60 or 90 %": [[0.3] * 3, [0.6] * 3, [0.9] * 3],
    "each row goes from 90 to 30 to 60 %": [[0.9, 0.3, 0.6]],
}
ALPHAS = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)


def accepted_tokens(chances: Sequence[float], step_tokens: int, seed: int) -> list[int]:
    """Tokens committed by each of STEPS steps: the base, and drafts up to the first that is rejected."""
    rng = np.random.default_rng(seed)
    found = []
    for step in range(STEPS):
        chance = chances[step * len(chances) // STEPS]
        draws = rng.random(step_tokens - 1) < chance
        found.append(1 + int(np.cumprod(draws).sum()))
    return found


def adaptive_rows(name: str, shape: SsmShape, step_tokens: int) -> list[dict[str, Any]]:
    """Bytes per token and layer by scenario: L = 16, the best one window for all rows, a window per row."""
    config, rows = ReplayConfig(window=MAX_WINDOW, max_step_tokens=step_tokens), []
    policy = AdaptiveWindow.for_shape(shape, config, step_tokens)
    for scenario, lives in SCENARIOS.items():
        runs = [accepted_tokens(chances, step_tokens, seed) for seed, chances in enumerate(lives)]
        mean = float(np.mean([np.mean(run) for run in runs]))
        windows = {16, best_window(shape, config, step_tokens, mean), *range(step_tokens, MAX_WINDOW + 1, 6)}

        def cost(choose: AdaptiveWindow | int, runs: list[list[int]] = runs) -> float:
            """Bytes per token over all rows."""
            follow = choose if isinstance(choose, AdaptiveWindow) else lambda _: choose
            moved = sum(simulate(shape, config, step_tokens, run, follow) * sum(run) for run in runs)
            return moved / sum(map(sum, runs))

        by_window = {w: cost(w) for w in windows}
        best = min(by_window, key=lambda w: by_window[w])
        adaptive = cost(policy)
        rows.append(
            {
                "shape": name, "T": step_tokens, "scenario": scenario, "mean_accepted": round(mean, 3),
                "bytes_at_16": round(by_window[16]), "best_window": best, "bytes_at_best": round(by_window[best]),
                "bytes_adaptive": round(adaptive), "saved_over_best": round(1.0 - adaptive / by_window[best], 4),
            }
        )  # fmt: skip
    return rows


def skip_rows(name: str, shape: SsmShape, window: int = 16) -> list[dict[str, Any]]:
    """Share of a head's bytes that decay-skip saves, by its constant decay per token and the output's type."""
    return [
        {
            "shape": name, "window": window, "output": output, "alpha": list(ALPHAS),
            "saved": [round(s, 4) for s in saving_by_decay(shape, window, eps, ALPHAS)],
        }
        for output, eps in THRESHOLDS.items()
    ]  # fmt: skip
