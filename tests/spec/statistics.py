"""Chi-square tests at a stated error rate, without a statistics package."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ERROR_RATE = 1e-6  # of each chi-square test: the chance that correct code would have failed for the seeds chosen
_SIGMAS = 4.7534  # the standard normal exceeds it with ERROR_RATE


def chi_square_bound(degrees: int) -> float:
    """The value that chi-square with `degrees` exceeds with ERROR_RATE (Wilson-Hilferty approximation)."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + _SIGMAS * math.sqrt(spread)) ** 3


def assert_drawn_from(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> None:
    """Observed counts [contexts, V] against exact probabilities, all contexts in one test; p = 0 must stay unseen."""
    assert (counts[probabilities == 0] == 0).all(), "a token of probability 0 was drawn"
    expected = probabilities * counts.sum(-1, keepdims=True)
    used = expected >= 5.0  # the usual condition of the chi-square approximation; the others are pooled per context
    statistic, degrees = 0.0, 0
    for row, want, use in zip(counts, expected, used, strict=True):
        cells = [(float(c), float(w)) for c, w in zip(row[use], want[use], strict=True)]
        if want[~use].sum() >= 5.0:
            cells.append((float(row[~use].sum()), float(want[~use].sum())))
        statistic += sum((c - w) ** 2 / w for c, w in cells)
        degrees += max(len(cells) - 1, 0)
    assert degrees > 0
    assert statistic < chi_square_bound(degrees), (statistic, degrees)


def assert_same_distribution(a: NDArray[np.int64], b: NDArray[np.int64]) -> None:
    """Two samples of counts [contexts, V] come from one distribution per context."""
    statistic, degrees = 0.0, 0
    for x, y in zip(a.astype(np.float64), b.astype(np.float64), strict=True):
        used = x + y >= 10.0
        if used.sum() < 2:
            continue
        ratio = np.sqrt(x[used].sum() / y[used].sum())
        statistic += float((((x[used] / ratio - y[used] * ratio) ** 2) / (x[used] + y[used])).sum())
        degrees += int(used.sum()) - 1
    assert degrees > 0
    assert statistic < chi_square_bound(degrees), (statistic, degrees)
