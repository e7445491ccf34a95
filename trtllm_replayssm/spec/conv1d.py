"""Depthwise causal convolution with a window that rolls back: a ring of pre-activation inputs.

Ring row = absolute position mod rows, rows = K - 1 + T_max, so a step never overwrites a tap it may still need and
rollback is nothing but a smaller `position`. Taps before position 0 are zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.spec.ssm import silu

Array = NDArray[np.float64]


def conv_step(window: Array, position: int, x: Array, weight: Array, bias: Array | None) -> Array:
    """T tokens: window [rows, C] (written), x [T, C], weight [C, 1, K], bias [C] or None -> SiLU(conv) [T, C]."""
    rows, taps = len(window), weight.shape[-1]
    out = np.zeros_like(x)
    for t in range(len(x)):
        now = position + t
        window[now % rows] = x[t]
        for j in range(taps):
            source = now - (taps - 1) + j
            if source >= 0:
                out[t] += weight[:, 0, j] * window[source % rows]
    return silu(out if bias is None else out + bias)


def conv_prefill(window: Array, position: int, x: Array, weight: Array, bias: Array | None) -> Array:
    """A prompt chunk of any length: the same result as its tokens one by one."""
    return np.concatenate([conv_step(window, position + t, x[t : t + 1], weight, bias) for t in range(len(x))])
