"""Choosing a window: by bytes from the traffic model, and by time from kernel measurements by committed records.

A measurement of one window tells the time of others: a step that does not flush costs a + b h, one that does c + b h,
with h committed records. The three numbers are fitted to the times by h, and every window is then costed over the cycle
its cursors run through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from trtllm_replayssm.config import MAX_WINDOW, ReplayConfig
from trtllm_replayssm.shapes import SsmShape
from trtllm_replayssm.spec.cursors import Cursors, commit, flushes
from trtllm_replayssm.spec.traffic import best_window, window_bytes_per_token

CLOSE = 0.01  # windows whose time is within this share of the best are taken as equal: the smallest needs least memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Microseconds of a step of `batch` rows: read + record * h, flush + record * h in steps that flush."""

    batch: int
    read: float
    flush: float
    record: float
    samples: int

    def per_token(self, config: ReplayConfig, mean_accepted: float) -> float:
        """Microseconds per committed token of a row in a steady run; acceptances as in `window_bytes_per_token`."""
        mean, tokens = Fraction(mean_accepted).limit_denominator(100), config.max_step_tokens
        cursors, spent, step = Cursors(), 0.0, 0
        seen: dict[tuple[int, int], tuple[float, int]] = {}
        while (cursors.h, step % mean.denominator) not in seen:
            seen[cursors.h, step % mean.denominator] = (spent, cursors.position)
            base = self.flush if flushes(config, cursors.h, tokens) else self.read
            spent += base + self.record * cursors.h
            accepted = math.floor((step + 1) * mean) - math.floor(step * mean)
            commit(config, cursors, tokens, accepted)
            step += 1
        before, position = seen[cursors.h, step % mean.denominator]
        return (spent - before) / (cursors.position - position)


def fit_times(rows: Sequence[dict[str, Any]], shape_name: str, batch: int, step_tokens: int) -> TimeModel | None:
    """The model of benchmark rows of one shape and T, at the measured batch closest to `batch`; None without any.

    Rows are those of `bench kernel`: what, shape, B, T, L, by_h, and formats where they are not float32. Where some
    of them are launches that promise settled states, as sessions make them, only those count.
    """
    fitting = [
        r for r in rows
        if r.get("what") == "update" and r["shape"] == shape_name and r["T"] == step_tokens
        and r.get("recurrence", "float32") == "float32" and not r.get("read")
    ]  # fmt: skip
    if not fitting:
        return None
    measured = min({r["B"] for r in fitting}, key=lambda b: abs(math.log(b / batch)))
    of_batch = [r for r in fitting if r["B"] == measured]
    equations, times = [], []
    for row in [r for r in of_batch if r.get("settled")] or of_batch:
        for h, us in row["by_h"].items():
            flush = int(h) + step_tokens > row["L"]
            equations.append([float(not flush), float(flush), float(h)])
            times.append(us)
    matrix = np.array(equations)
    if np.linalg.matrix_rank(matrix) < 3:
        return None
    read, flush_time, record = np.linalg.lstsq(matrix, np.array(times), rcond=None)[0]
    return TimeModel(
        batch=measured, read=float(read), flush=float(flush_time), record=max(float(record), 0.0), samples=len(times)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A window and why; by_traffic and by_time: what each method alone would take (by_time None without times)."""

    window: int
    by_traffic: int
    by_time: int | None
    why: tuple[str, ...]


def choose_window(
    shape: SsmShape, config: ReplayConfig, mean_accepted: float, times: TimeModel | None
) -> Choice:
    """The window for steps of config.max_step_tokens that commit `mean_accepted` on average.

    By time where there are measurements, else by bytes. Within CLOSE of the best the smallest window is taken.
    """
    tokens = config.max_step_tokens
    candidates = [replace(config, window=w) for w in range(tokens, MAX_WINDOW + 1)]
    by_traffic = best_window(shape, config, tokens, mean_accepted)

    def bytes_at(window: int) -> float:
        return window_bytes_per_token(shape, replace(config, window=window), tokens, mean_accepted)

    moved = bytes_at(by_traffic)
    why = [f"bytes: L = {by_traffic} moves {moved / 1e3:.1f} kB per token, row and layer, the fewest"]
    if times is None:
        window = min(c.window for c in candidates if bytes_at(c.window) <= (1.0 + CLOSE) * moved)
        why.append("time: no measurement of this shape, batch and T on this GPU")
        why.append(f"taken: L = {window}, the smallest within {CLOSE:.0%} of the fewest bytes")
        return Choice(window=window, by_traffic=by_traffic, by_time=None, why=tuple(why))
    cost = {c.window: times.per_token(c, mean_accepted) for c in candidates}
    by_time = min(cost, key=lambda w: (cost[w], w))
    window = min(w for w in cost if cost[w] <= (1.0 + CLOSE) * cost[by_time])
    why.append(
        f"time: a step of {times.batch} rows takes {times.read:.1f} us, {times.flush:.1f} us when it flushes, and "
        f"{times.record:.2f} us per committed record ({times.samples} measured steps); L = {by_time} is fastest"
    )
    why.append(
        f"taken: L = {window}, the smallest within {CLOSE:.0%} of the fastest ({cost[window]:.1f} us per token of all "
        f"rows; L = {by_traffic}: {cost[by_traffic]:.1f} us)"
    )
    return Choice(window=window, by_traffic=by_traffic, by_time=by_time, why=tuple(why))
