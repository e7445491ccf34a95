"""A window per row that follows its acceptance: a policy as a pure function, and what it saves by the traffic model.

A row flushes when h + T exceeds its own window, which is at most the ring's. The best window grows like the root of the
mean acceptance (paper, Eq. 16), so a row that accepts more should keep more records. No kernel takes a window per row
yet: this says what one would gain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trtllm_replayssm.config import MAX_WINDOW, ReplayConfig
from trtllm_replayssm.shapes import SsmShape
from trtllm_replayssm.spec.traffic import best_window, step_bytes

STEPS_PER_TOKEN = 4  # entries of a policy's table for each token of mean acceptance
Policy = Callable[[Sequence[int]], int]
"""Tokens committed by each earlier step of the row -> its window for the next step."""


@dataclass(frozen=True, slots=True)
class AdaptiveWindow:
    """The best window for the mean acceptance of the last `horizon` steps; before the first step, for full acceptance.

    windows[i]: best window at a mean of 1 + i / STEPS_PER_TOKEN tokens a step.
    """

    windows: tuple[int, ...]
    horizon: int = 16

    @staticmethod
    def for_shape(shape: SsmShape, config: ReplayConfig, step_tokens: int, *, horizon: int = 16) -> AdaptiveWindow:
        """The table of a layer's shape and formats; windows are at most the ring's, `config.window`."""
        means = [1.0 + i / STEPS_PER_TOKEN for i in range(STEPS_PER_TOKEN * (step_tokens - 1) + 1)]
        best = (min(best_window(shape, config, step_tokens, mean), config.window) for mean in means)
        return AdaptiveWindow(tuple(best), horizon)

    def __call__(self, history: Sequence[int]) -> int:
        """See `Policy`."""
        recent = history[-self.horizon :]
        if not recent:
            return self.windows[-1]
        mean = sum(recent) / len(recent)
        place = round((mean - 1.0) * STEPS_PER_TOKEN)
        return self.windows[min(max(place, 0), len(self.windows) - 1)]


def simulate(
    shape: SsmShape, config: ReplayConfig, step_tokens: int, accepted: Sequence[int], policy: Policy,
    act_itemsize: int = 2,
) -> float:  # fmt: skip
    """Bytes of state and records per committed token of one row and layer whose steps commit `accepted`."""
    h, moved = 0, 0
    history: list[int] = []
    for taken in accepted:
        window = policy(history)
        flush = h + step_tokens > window and h > 0
        # the byte count follows `config.window`: one that makes the same decision stands in for the row's own
        stand_in = max(h, step_tokens) if flush else MAX_WINDOW
        layout = replace(config, window=stand_in, max_step_tokens=step_tokens)
        moved += step_bytes(shape, layout, h, step_tokens, act_itemsize).total
        h = taken if flush else h + taken
        history.append(taken)
    return moved / sum(accepted)
