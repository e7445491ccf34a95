"""The decays a checkpoint really has on text: log-decays of every token, layer and head, read from the ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops.layer_state import ReplayLayerState
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding, Model
from trtllm_replayssm.runtime.evaluation.streams import Stream
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec.decay_skip import live_shares, skipping_bytes_per_token

Array = NDArray[np.float64]
STEP = 8
WINDOWS = (8, 16, 32, 64)
THRESHOLDS = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}
"""Half a last place of a value of one: what an output of that type does not resolve."""


def measure_decays(
    model: Model, streams: Sequence[Stream], prompt: int, tokens: int, advance: Callable[[int], None]
) -> Array:
    """Log-decays [tokens, layers, rows, H] of the tokens behind the prompt, teacher-forced with a float32 state."""
    run = ForcedDecoding(model, ReplayConfig(window=STEP, max_step_tokens=STEP - 1), streams, prompt)
    parts = []
    for _ in range(0, tokens, STEP):
        run.step(1)
        run.step(STEP - 1)
        parts.append(_last_window(run))
        advance(STEP)
    return np.concatenate(parts)[:tokens]


def _last_window(run: ForcedDecoding) -> Array:
    """Log-decays [STEP, layers, rows, H] of a window that is full."""
    pools, found = run.session.pools, []
    slots = torch.tensor(run.slots, device=pools.cursors.origin.device)
    for layer, state in pools.ssm.items():
        assert isinstance(state, ReplayLayerState)
        places = torch.arange(STEP, device=slots.device) + pools.cursors.origin[slots].long()[:, None]
        decays = state.ring_decay[slots[:, None], :, places % state.config.ring_rows]
        if pools.geometry.ssm.kind is SsmKind.MAMBA2:
            decays = decays * run.decay_rates(layer)
        found.append(decays.double().cpu().numpy())
    return np.asarray(np.stack(found).transpose(2, 0, 1, 3))


def describe_decays(log_decays: Array, shape: SsmShape) -> dict[str, Any]:
    """Mean log-decay of each layer and head, shares of heads that fade, and what skipping their reads would save.

    saved: by threshold and window, bytes of state and records per token without and with skipping, plain decoding with
    one float32 checkpoint (the paper's setting).
    """
    saved = []
    for name, eps in THRESHOLDS.items():
        live = live_shares(log_decays, eps, max(WINDOWS))
        for window in WINDOWS:
            config = ReplayConfig(window=window)
            plain, skipping = skipping_bytes_per_token(shape, config, live.tolist(), 1, 1)
            saved.append(
                {
                    "output": name, "skip_below": eps, "window": window, "bytes_per_token": round(plain),
                    "skipping_bytes_per_token": round(skipping), "saved": round(1.0 - skipping / plain, 4),
                    "live_at_flush": round(float(live[window]), 4),
                }
            )  # fmt: skip
    return {
        "tokens": len(log_decays),
        "mean_log_decay": [[float(f"{v:.5g}") for v in layer] for layer in log_decays.mean(axis=(0, 2))],
        "live_share": {
            name: [round(float(v), 4) for v in live_shares(log_decays, eps, max(WINDOWS))]
            for name, eps in THRESHOLDS.items()
        },
        "saved": saved,
    }


def saving_by_decay(shape: SsmShape, window: int, skip_below: float, alphas: Sequence[float]) -> list[float]:
    """Share of a head's bytes per token that skipping saves when it decays by a constant alpha per token."""
    config, shares = ReplayConfig(window=window), []
    for alpha in alphas:
        decays = np.full((window, 1), np.log(alpha))
        live = live_shares(decays, skip_below, window)
        plain, skipping = skipping_bytes_per_token(shape, config, live.tolist(), 1, 1)
        shares.append(1.0 - skipping / plain)
    return shares
