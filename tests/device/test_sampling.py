"""Tokens drawn on the device are those of the host, for every filter; what is kept is the same set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.device.requests import entry, host_tokens, on_devices, registers
from trtllm_replayssm.runtime.device import sampling
from trtllm_replayssm.runtime.device.entry import SamplingMode, device_eligible, sampling_mode
from trtllm_replayssm.runtime.device.registers import BLOCK
from trtllm_replayssm.runtime.sampling.distribution import probabilities
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.spec.philox import Domain, uniform

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 5},
    {"top_k": 1},
    {"temperature": 1.3, "top_p": 0.9},
    {"top_p": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 100_000, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1e-200},
    {"temperature": 2.0, "top_p": 1e-60},  # float32 has nothing so small
    {"temperature": 2.0, "top_k": 1 << 70, "min_p": 1e-60},  # int64 has nothing so large
]
VOCABULARIES = (7, 1024, 5003)


def drawn(
    logits: np.ndarray, params: list[SamplingParams], seeds: list[int], at: list[int], device: str
) -> list[list[int]]:
    """Device tokens [B][T] for logits [B, T, V]."""
    entries = [entry(i, p, seed=s, tokens=[1] * n) for i, (p, s, n) in enumerate(zip(params, seeds, at, strict=True))]
    mode = max(sampling_mode(p) for p in params)
    rows = torch.arange(len(params), device=device)
    picked = sampling.pick(torch.from_numpy(logits).to(device), registers(entries, device), rows, mode)
    assert picked.finite.all()
    return picked.tokens.tolist()


@on_devices
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_mixed_rows_draw_what_the_host_draws(vocab: int, device: str) -> None:
    """14 settings side by side, 2 positions each, 60 rounds: 1,680 draws of each vocabulary, none differs."""
    rng = np.random.default_rng(vocab)
    params = [SamplingParams(**settings) for settings in SETTINGS]
    for round_ in range(60):
        logits = (rng.standard_normal((len(params), 2, vocab)) * rng.uniform(0.5, 6)).astype(np.float32)
        seeds, at = [int(s) for s in rng.integers(0, 2**64, len(params), dtype=np.uint64)], [1 + round_] * len(params)
        got = drawn(logits, params, seeds, at, device)
        for i, (p, seed) in enumerate(zip(params, seeds, strict=True)):
            want = [host_tokens(logits[i, t : t + 1], (), p, seed, at[i] + t)[0] for t in range(2)]
            assert got[i] == want, (i, SETTINGS[i])


@on_devices
def test_only_draws_within_float32_noise_of_a_boundary_may_differ(device: str) -> None:
    """100,000 draws from one distribution of 4,096 tokens: each differs only within 1e-6 of a boundary."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(4096) * 3).astype(np.float32)
    params = SamplingParams(temperature=0.83)
    u = rng.random(100_000)
    best, temperature = torch.tensor([[logits.max()]], device=device), torch.tensor([0.83], device=device)
    weights = sampling.scaled(torch.from_numpy(logits).to(device)[None, None], best, temperature).view(1, -1)
    parts = [sampling.draw(weights.expand(1000, -1), torch.from_numpy(part).to(device)) for part in u.reshape(-1, 1000)]
    got = torch.cat(parts).cpu().numpy()
    cumulative = np.cumsum(probabilities(logits.astype(np.float64), params))
    want = np.searchsorted(cumulative, u * cumulative[-1], side="right")
    differs = got != want
    nearest = np.abs(cumulative[np.minimum(got, want)[differs]] - u[differs])
    assert differs.sum() <= 20 and (nearest < 1e-6).all()


@on_devices
def test_ties_go_to_the_lowest_ids_in_every_filter(device: str) -> None:
    logits = np.array([[2.0, 3.0, 3.0, 3.0, 1.0, 3.0]], np.float32)
    for settings, allowed in (({"top_k": 2}, {1, 2}), ({"top_p": 0.4}, {1, 2}), ({"top_k": 3, "top_p": 0.3}, {1})):
        params = [SamplingParams(temperature=1.0, seed=seed, **settings) for seed in range(60)]  # type: ignore[arg-type]
        got = drawn(np.repeat(logits[None], 60, 0), params, list(range(60)), [1] * 60, device)
        assert {row[0] for row in got} == allowed
    assert drawn(logits[None], [SamplingParams()], [0], [1], device) == [[1]]


@on_devices
def test_a_token_of_weight_zero_is_never_drawn_even_at_the_ends(device: str) -> None:
    weights = torch.zeros((3, 2 * BLOCK), device=device)
    weights[0, 5] = weights[1, 1500] = 1.0
    weights[2, 1023] = weights[2, 1024] = 0.5
    for u in (0.0, 0.5, float(np.nextafter(1.0, 0.0))):
        got = sampling.draw(weights, torch.full((3,), u, dtype=torch.float64, device=device)).tolist()
        assert got == [5, 1500, 1023 if u < 0.5 else 1024]


@on_devices
def test_rows_that_are_no_numbers_are_told(device: str) -> None:
    logits = torch.zeros((4, 1, 10), device=device)
    logits[0, 0, 3] = float("nan")
    logits[1] = -float("inf")
    logits[2, 0, 3] = float("inf")
    made = registers([entry(i, SamplingParams(temperature=1.0, top_p=0.5)) for i in range(4)], device)
    for mode in SamplingMode:
        picked = sampling.pick(logits, made, torch.arange(4, device=device), mode)
        assert picked.finite[:, 0].tolist() == [False, False, False, True]
        assert ((picked.tokens >= 0) & (picked.tokens < 10)).all()


def test_modes_and_eligibility_follow_from_the_settings() -> None:
    modes = [sampling_mode(SamplingParams(**settings)) for settings in SETTINGS]
    assert modes == [0, 0, 1, 1, 2, 0, 2, 0, 2, 2, 2, 1, 2, 2]
    for settings in (
        {"presence_penalty": 0.1}, {"logit_bias": {1: 1.0}}, {"repetition_penalty": 1.2}, {"logprobs": 0},
        {"min_tokens": 1},
    ):  # fmt: skip
        assert not device_eligible(SamplingParams(**settings), 1)  # type: ignore[arg-type]
    assert device_eligible(SamplingParams(stop=["x"]), 1)
    assert not device_eligible(SamplingParams(stop=["x"]), 1, exact_end=True)
    assert device_eligible(SamplingParams(), 16) and not device_eligible(SamplingParams(), 17)


@on_devices
def test_the_number_of_a_position_is_the_host_s(device: str) -> None:
    """A two-token vocabulary of equal weights shows on which side of one half each number lies."""
    logits = np.zeros((1, 4, 2), np.float32)
    for seed in range(20):
        got = drawn(logits, [SamplingParams(temperature=1.0)], [seed], [9], device)
        assert got[0] == [int(uniform(seed, 9 + t, Domain.TOKEN) >= 0.5) for t in range(4)]
