"""The kernel that chooses tokens: those of the host, for every setting, vocabulary and tie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.device.requests import entry, host_tokens
from tests.native import harness
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops.native_draw import draw
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.0, "top_k": 1000},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.2},
    {"temperature": 1.0, "top_p": 0.9999},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 10**9, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1e-200},
]
WIDTH = 2


def registers(params: list[SamplingParams], seeds: list[int], length: int) -> Registers:
    made = Registers.allocate(len(params), 0, 0, torch.device("cuda"))
    made.enter(
        [entry(i, p, seed=s, tokens=[1] * length) for i, (p, s) in enumerate(zip(params, seeds, strict=True))]
    )
    return made


def chosen(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], length: int) -> list[list[int]]:
    rows = torch.arange(len(params), device="cuda")
    tokens, finite = draw(logits.cuda(), rows, registers(params, seeds, length).settings())
    assert (finite == 1).all()
    return tokens.tolist()


@pytest.mark.parametrize("grain", [None, 0.25], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab", [1, 3, 130, 4097, 50_257, 131_072])
def test_every_setting_draws_what_the_host_draws(vocab: int, grain: float | None) -> None:
    """12 settings side by side, 2 positions each; grain: logits are multiples of it, so that filters cut ties."""
    rng = np.random.default_rng(vocab)
    params = [SamplingParams(**settings) for settings in SETTINGS]
    rounds = 30 if vocab < 10_000 else 4
    for round_ in range(rounds):
        logits = (rng.standard_normal((len(params), WIDTH, vocab)) * rng.uniform(0.5, 5)).astype(np.float32)
        if grain is not None:
            logits = np.round(logits / grain).astype(np.float32) * np.float32(grain)
        seeds = [int(s) for s in rng.integers(0, 2**64, len(params), dtype=np.uint64)]
        got = chosen(torch.from_numpy(logits), params, seeds, 5 + round_)
        for i, (p, seed) in enumerate(zip(params, seeds, strict=True)):
            want = [host_tokens(logits[i, t : t + 1], (), p, seed, 5 + round_ + t)[0] for t in range(WIDTH)]
            assert got[i] == want, (round_, SETTINGS[i])


def test_filters_keep_the_lowest_ids_of_a_tie_and_no_other() -> None:
    """60 seeds each: what is drawn is exactly the set that the rule leaves."""
    logits = torch.tensor([2.0, 3.0, 3.0, 3.0, 1.0, 3.0] + [-5.0] * 300)
    for settings, allowed in (({"top_k": 2}, {1, 2}), ({"top_p": 0.4}, {1, 2}), ({"top_k": 3, "top_p": 0.3}, {1})):
        params = [SamplingParams(temperature=1.0, **settings)] * 60  # type: ignore[arg-type]
        got = chosen(logits.expand(60, 1, -1), params, list(range(60)), 3)
        assert {row[0] for row in got} == allowed


def test_a_row_s_token_does_not_depend_on_its_batch_or_on_where_its_logits_lie() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn((6, 3, 2001), generator=generator).cuda() * 3
    params = [SamplingParams(temperature=1.2, top_p=0.8)] * 6
    rows = torch.arange(6, device="cuda")
    made = registers(params, list(range(6)), 9)
    whole, _ = draw(logits, rows, made.settings())
    shifted = torch.zeros((6, 3, 2004), device="cuda")[..., 1:2002]
    shifted.copy_(logits)
    assert (draw(shifted, rows, made.settings())[0] == whole).all()
    for i in range(6):
        one, _ = draw(logits[i : i + 1, :2], rows[i : i + 1], made.settings())
        assert (one == whole[i, :2]).all()


def test_rows_that_are_no_numbers_are_told_and_entries_out_of_range_do_no_harm() -> None:
    logits = torch.zeros((6, 1, 1000), device="cuda")
    logits[0, 0, 999] = float("nan")
    logits[1] = -float("inf")
    logits[2, 0, 3] = float("inf")
    logits[3, 0, 3:] = -float("inf")
    made = registers([SamplingParams(temperature=1.0, top_p=0.5)] * 4, [1] * 4, 2)
    rows = torch.tensor([0, 1, 2, 3, -5, 1 << 40], device="cuda")
    tokens, finite = draw(logits, rows, made.settings())
    assert finite[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    tokens = tokens[:, 0]
    assert ((tokens >= 0) & (tokens < 1000)).all() and tokens[3] < 3 and tokens[4:].tolist() == [0, 0]


def test_logits_of_another_type_are_refused() -> None:
    made = registers([SamplingParams()], [1], 2)
    logits = torch.zeros((1, 1, 8), dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ContractError, match="logits"):
        draw(logits, torch.zeros(1, dtype=torch.int64, device="cuda"), made.settings())
