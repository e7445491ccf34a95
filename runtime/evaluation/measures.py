"""What is measured at a length: divergence of outputs, loss of the text, error of states. Pure functions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def log_softmax(logits: NDArray[np.floating]) -> Array:
    """Log-probabilities over the last axis, float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def kl_divergence(reference: NDArray[np.floating], other: NDArray[np.floating]) -> Array:
    """D(reference || other) in nats from log-probabilities [..., V] -> [...] (paper, Appendix E.4.3)."""
    wide = reference.astype(np.float64)
    return np.asarray((np.exp(wide) * (wide - other)).sum(axis=-1))


def relative_state_error(states: NDArray[np.floating], exact: NDArray[np.floating]) -> Array:
    """|states - exact| / |exact| of each head, Frobenius norms: [layers, rows, H, P, N] -> [layers, rows, H]."""
    wide = exact.astype(np.float64)
    difference = np.linalg.norm(states - wide, axis=(-2, -1))
    size = np.linalg.norm(wide, axis=(-2, -1))
    return np.asarray(difference / np.where(size > 0.0, size, 1.0))
