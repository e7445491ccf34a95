"""Registers of a few requests, and the host's answer for the same rows, for the tests of this folder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trtllm_replayssm.runtime.device.entry import DeviceEntry
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.sampling.distribution import TokenHistory
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.speculative.drafter import Draft
from trtllm_replayssm.runtime.speculative.verify import VerifyContext, verify

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)


def entry(slot: int, params: SamplingParams, **changes: object) -> DeviceEntry:
    """A request with these settings; its text is one token, its room without end, unless changed."""
    values: dict[str, object] = {
        "slot": slot, "tokens": [1], "room": 1 << 20, "stop_ids": (), "seed": params.seed or 0, "drafts": (), "q": None,
        "greedy": params.greedy, "temperature": 1.0 if params.temperature is None else params.temperature,
        "top_k": params.top_k or 0, "top_p": 1.0 if params.top_p is None else params.top_p,
        "min_p": params.min_p or 0.0,
    }  # fmt: skip
    return DeviceEntry(**(values | changes))  # type: ignore[arg-type]


def registers(entries: list[DeviceEntry], device: str) -> Registers:
    """Registers whose slot i holds entry i."""
    made = Registers.allocate(len(entries), 0, 0, torch.device(device))
    made.enter(entries)
    return made


def host_tokens(logits: np.ndarray, drafts: tuple[int, ...], params: SamplingParams, seed: int, at: int) -> list[int]:
    """What the host emits for logits [n + 1, V] behind `at` tokens of text, with nothing to stop it."""
    context = VerifyContext(params=params, history=TokenHistory([1]), stop_ids=frozenset(), seed=seed, position=at)
    tokens: list[int] = []
    verify(logits, Draft(drafts), context, lambda token, _: bool(tokens.append(token)))  # type: ignore[func-returns-value]
    return tokens
