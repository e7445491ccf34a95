"""Elementwise float32 functions as TensorRT layers, each of which the compiler fuses into one kernel."""

from __future__ import annotations

from typing import Any

from trtllm_replayssm.builders.network import Network

_SERIES_BELOW = 2.0**-6  # four terms of log(1 + s) are exact to 2^-26 there


def silu(net: Network, x: Any) -> Any:
    """x * sigmoid(x)."""
    wide = net.wide(x)
    return net.binary(wide, net.activate(wide, "SIGMOID", "sigmoid"), "PROD", "silu")


def softplus(net: Network, x: Any) -> Any:
    """log(1 + exp(x)), accurate for either sign and any size; x [B, T, n] float32."""
    positive = net.activate(x, "RELU", "positive part")
    small = net.unary(net.unary(net.unary(x, "ABS", "size"), "NEG", "minus size"), "EXP", "decay of size")
    return net.binary(positive, _log1p(net, small), "SUM", "softplus")


def normalised(net: Network, x: Any, eps: float) -> Any:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    mean = net.reduce_last(net.binary(x, x, "PROD", "squares"), "AVG", "mean square")
    root = net.unary(net.binary(mean, net.scalar(eps, len(x.shape)), "SUM", "with eps"), "SQRT", "root")
    return net.binary(x, net.unary(root, "RECIP", "inverse root"), "PROD", "normalise")


def _log1p(net: Network, s: Any) -> Any:
    """log(1 + s) for s in [0, 1]: a series where 1 + s would lose the digits of s."""
    series = net.scalar(-0.25)
    for factor in (1 / 3, -0.5, 1.0):
        series = net.binary(net.binary(series, s, "PROD", "series"), net.scalar(factor), "SUM", "series")
    series = net.binary(series, s, "PROD", "series")
    log = net.unary(net.binary(s, net.scalar(1.0), "SUM", "one plus"), "LOG", "log")
    tiny = net.binary(s, net.scalar(_SERIES_BELOW), "LESS", "tiny")
    return net.named(net.definition.add_select(tiny, series, log), "log1p")
