"""Activation functions whose result for an element depends on nothing but that element.

torch's own silu, sigmoid and softplus round differently at the end of a buffer than inside it, so a token's value would
depend on how many tokens share its call. exp and log1p do not.
"""

from __future__ import annotations

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x / (1.0 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), stable for either sign."""
    return x.clamp(min=0.0) + (-x.abs()).exp().log1p()
