"""State error of each head against the theory of rounding errors that re-enter a recurrence (paper, Appendix C.6).

A shared checkpoint is rounded every L tokens, and each error then decays by alpha^L until the next. After n writes a
bias b has grown to b (1 - alpha^(L n)) / (1 - alpha^L), a variance s^2 to s^2 (1 - alpha^(2 L n)) / (1 - alpha^(2 L));
with n without bound these are the paper's limits. Rounding to nearest is set against the first, stochastic rounding
against the root of the second. The state that is measured is the checkpoint with its h records applied, so that its
error has decayed by alpha^h since the last write. The theory gives the shape over decays, not the size: one factor a
curve is fitted, on the first recurrent layer, whose inputs are the reference's: in the others the error that comes in
with the inputs is added, which fast heads show most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import ConfigError

Array = NDArray[np.float64]
FLOAT32_NOISE = 1e-6  # relative errors below it are float32's own: of heads that forget within the window
ABOVE_FLOOR = 3.0  # an error below so many times what a float32 checkpoint leaves in the same head is not its format's
FEWEST = 4  # heads that say something about a curve


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


def _rank(a: Array, b: Array) -> float | None:
    return round(rank_correlation(a, b), 3) if len(a) >= FEWEST else None


def compare(
    row: dict[str, Any], mean_log_decay: Sequence[Sequence[float]], floor: Sequence[Sequence[float]] | None = None
) -> dict[str, Any]:
    """A measurement of a shared low-precision checkpoint beside its theory, head by head.

    row: of a divergence result. floor: state_error of a shared float32 checkpoint at that length, which has what the
    activations' type leaves; None: float32's own error alone. factor: the size of one rounding relative to the state,
    fitted on the first layer as the median ratio; rank_correlation and typical_ratio, the median of
    max(measured / theory, theory / measured) after the fit, are of the first layer (None with fewer than FEWEST heads),
    *_all of all layers; heads whose error is no more than that floor leaves are left out. log_decay, measured, theory:
    by head, the first layer first.
    """
    if not row["formats"].startswith("shared") or row["formats"] == "shared-fp32":
        raise ConfigError("eval drift", "configuration", expected="a shared low-precision one", got=row["formats"])
    decays = np.array(mean_log_decay).ravel()
    errors = np.array([[np.nan if v is None else v for v in layer] for layer in row["state_error"]]).ravel()
    if decays.shape != errors.shape:
        raise ConfigError("eval drift", "decays", expected=f"{errors.size} heads", got=decays.size)
    # plain decoding flushes before token L + 1, 2 L + 1, ...; the first write is the prompt's
    flushes, records = divmod(row["length"] - 1, row["window"])
    growth = deviation_growth if row["formats"].endswith("-sr") else bias_growth
    shape = growth(decays, row["window"], flushes + 1) * np.exp(decays * (records + 1))
    if not np.isfinite(errors).all():
        raise ConfigError("eval drift", row["configuration"], expected="finite states", got="a state that overflowed")
    noise = np.full(errors.shape, FLOAT32_NOISE)
    if floor is not None:
        noise = np.maximum(noise, ABOVE_FLOOR * np.array(floor).ravel())
    above = errors > noise
    first = above & (np.arange(errors.size) < len(row["state_error"][0]))
    if not first.any():
        raise ConfigError("eval drift", row["configuration"], expected="errors in the first layer", got="none")
    theory = np.maximum(float(np.median(errors[first] / shape[first])) * shape, FLOAT32_NOISE)
    expected = np.maximum(theory, noise)[above]
    ratio = np.maximum(errors[above] / expected, expected / errors[above])
    first_ratio = ratio[first[above]]
    return {
        "configuration": row["configuration"], "length": row["length"],
        "factor": float(f"{np.median(errors[first] / shape[first]):.4g}"),
        "first_layer": len(row["state_error"][0]), "first_layer_above_noise": int(first.sum()),
        "rank_correlation": _rank(errors[first], theory[first]),
        "rank_correlation_all": _rank(errors[above], theory[above]),
        "typical_ratio": round(float(np.median(first_ratio)), 3) if first.sum() >= FEWEST else None,
        "typical_ratio_all": round(float(np.median(ratio)), 3),
        "log_decay": decays.tolist(),
        "measured": [float(f"{v:.4g}") for v in errors],
        "theory": [float(f"{v:.4g}") for v in theory],
    }  # fmt: skip
