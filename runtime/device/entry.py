"""What the host tells the device of a request when it begins to decode there, and which requests may. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.runtime.sampling.params import SamplingParams

MAX_STOP_IDS = 16


class SamplingMode(IntEnum):
    """What the rows of a step need at most, cheapest first."""

    GREEDY = 0
    SAMPLED = 1  # temperature alone
    FILTERED = 2  # with top-k, top-p or min-p


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """One request. tokens: prompt and output, the last one is the next base token; room: output tokens still allowed.

    stop_ids: every token that ends it; drafts: of the next step, drawn from q [n, V], or not drawn (None). The
    settings are resolved: top_k 0, top_p 1 and min_p 0 filter nothing.
    """

    slot: int
    tokens: Sequence[int]
    room: int
    stop_ids: Sequence[int]
    seed: int
    drafts: Sequence[int]
    q: NDArray[np.float64] | None
    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True)
class RowReport:
    """One row of a step. tokens: emitted, as many as were committed; num_tokens: base and drafts that it ran, 0 when
    its request had ended before; broken: its logits are no finite numbers, and nothing was emitted.
    """

    tokens: tuple[int, ...]
    num_tokens: int
    broken: bool


def sampling_mode(params: SamplingParams) -> SamplingMode:
    """What a request's settings need."""
    if params.greedy:
        return SamplingMode.GREEDY
    filtered = params.top_k or (params.top_p is not None and params.top_p < 1) or params.min_p
    return SamplingMode.FILTERED if filtered else SamplingMode.SAMPLED


def device_eligible(params: SamplingParams, stop_ids: int, *, exact_end: bool = False) -> bool:
    """Whether a request can decode on the device, one step ahead of what the host has seen.

    Penalties, a bias, a mask, a minimum length and log-probabilities need the host between two tokens. Stop strings
    are found one step late, and what was drawn behind them is dropped. stop_ids: how many tokens end the request.
    exact_end: the slot's state at the end will be kept, so that nothing may be drawn behind it.
    """
    needs_host = params.penalises or params.logits_mask is not None or params.logprobs is not None
    late = bool(params.stops) and exact_end
    return not needs_host and not params.min_tokens and not late and stop_ids <= MAX_STOP_IDS
