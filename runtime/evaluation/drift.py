"""State error of each head against the theory of rounding errors that re-enter a recurrence (paper, Appendix C.6).

A shared checkpoint is rounded every L tokens, and each error then decays by alpha^L until the next. After n writes a
bias b has grown to b (1 - alpha^(L n)) / (1 - alpha^L), a variance s^2 to s^2 (1 - alpha^(2 L n)) / (1 - alpha^(2 L));
with n without bound these are the paper's limits. Rounding to nearest is set against the first, stochastic rounding
against the root of the second. The theory gives the shape over decays, not the size: one factor a curve is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import ConfigError

Array = NDArray[np.float64]


def bias_growth(log_decay: Array, window: int, writes: int) -> Array:
    """(1 - alpha^(L n)) / (1 - alpha^L) for mean log-decays; n where alpha is 1."""
    return _geometric(log_decay * window, writes)


def deviation_growth(log_decay: Array, window: int, writes: int) -> Array:
    """Root of (1 - alpha^(2 L n)) / (1 - alpha^(2 L))."""
    return np.asarray(np.sqrt(_geometric(2.0 * log_decay * window, writes)))


def _geometric(exponent: Array, terms: int) -> Array:
    """Sum of exp(exponent j) for j = 0 .. terms - 1."""
    x = np.minimum(exponent, -1e-12)
    return np.asarray(np.expm1(x * terms) / np.expm1(x))


def rank_correlation(a: Array, b: Array) -> float:
    """Spearman's coefficient; ties keep the order they come in."""
    ranks = [np.argsort(np.argsort(v)).astype(np.float64) for v in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def compare(row: dict[str, Any], mean_log_decay: Sequence[Sequence[float]]) -> dict[str, Any]:
    """A measurement of a shared low-precision checkpoint beside its theory, head by head.

    row: of a divergence result. factor: the size of one rounding relative to the state, fitted as the median ratio;
    typical_ratio: the median of max(measured / theory, theory / measured) after the fit.
    """
    if not row["formats"].startswith("shared") or row["formats"] == "shared-fp32":
        raise ConfigError("eval drift", "configuration", expected="a shared low-precision one", got=row["formats"])
    decays = np.array(mean_log_decay).ravel()
    errors = np.array([[np.nan if v is None else v for v in layer] for layer in row["state_error"]]).ravel()
    if decays.shape != errors.shape:
        raise ConfigError("eval drift", "decays", expected=f"{errors.size} heads", got=decays.size)
    writes = max(row["length"] // row["window"], 1)
    growth = deviation_growth if row["formats"].endswith("-sr") else bias_growth
    shape = growth(decays, row["window"], writes)
    finite = np.isfinite(errors) & (errors > 0)
    factor = float(np.median(errors[finite] / shape[finite]))
    ratio = errors[finite] / (factor * shape[finite])
    return {
        "configuration": row["configuration"], "length": row["length"], "factor": float(f"{factor:.4g}"),
        "rank_correlation": round(rank_correlation(errors[finite], shape[finite]), 3),
        "typical_ratio": round(float(np.median(np.maximum(ratio, 1.0 / ratio))), 3),
        "log_decay": decays[finite].tolist(),
        "measured": [float(f"{v:.4g}") for v in errors[finite]],
        "theory": [float(f"{v:.4g}") for v in factor * shape[finite]],
    }  # fmt: skip
