"""What is measured at a length: divergence of outputs, loss of the text, error of states. Pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities over the last axis, float64."""
    return logits.double().log_softmax(-1)


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """D(reference || other) in nats from log-probabilities [..., V] -> [...] float64 (paper, Appendix E.4.3)."""
    wide = reference.double()
    return (wide.exp() * (wide - other)).sum(-1)


def extra_loss(reference: Tensor, other: Tensor, following: Tensor) -> Tensor:
    """Loss of the text's next tokens [...] above the reference's, nats: from log-probabilities [..., V] -> [...]."""
    index = following[..., None]
    return reference.double().gather(-1, index)[..., 0] - other.gather(-1, index)[..., 0]


def relative_state_error(states: Tensor, exact: Tensor) -> Tensor:
    """|states - exact| / |exact| of each head, Frobenius: [layers, rows, H, P, N] -> [layers, rows, H], float64."""
    wide = exact.double()
    size: Tensor = wide.flatten(-2).norm(dim=-1)
    difference: Tensor = (states - wide).flatten(-2).norm(dim=-1)
    return difference / torch.where(size > 0.0, size, 1.0)
