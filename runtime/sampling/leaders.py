"""The largest of very many numbers, without sorting or partitioning all of them: vocabularies have 250,000 entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 16  # numbers of a group, at least: below that groups save nothing


def leaders(values: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Indices of values [n], rising: all that are not below some bound, which is one of them; at least `count`, 1..n.

    The values have no NaN. The bound is the count-th largest of the maxima of groups: as many values reach it at least,
    and of values in no particular order not many more.
    """
    group = max(values.size // (8 * count), 1)
    if group < _LEAST:
        bound = np.partition(values, values.size - count)[values.size - count]
    else:
        even = values.size - values.size % group
        best = values[:even].reshape(-1, group).max(axis=1)
        bound = np.partition(best, best.size - count)[best.size - count]
    return np.flatnonzero(values >= bound)


def falling(values: NDArray[np.floating[Any]], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rising indices of values, by falling value instead: the lowest first where values are equal."""
    return ids[np.argsort(-values[ids], kind="stable")]
