"""Which tokens of a step count: drafts that agree, stop tokens, the length, rows that have ended or are broken."""

from __future__ import annotations

import numpy as np
import torch

from tests.device.requests import entry, on_devices, registers
from trtllm_replayssm.runtime.device.acceptance import agreed, cut
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.output import EndRules, OutputBuffer
from trtllm_replayssm.spec.accept import greedy_accept

GREEDY = SamplingParams()


@on_devices
def test_as_many_tokens_count_as_the_greedy_rule_accepts(device: str) -> None:
    rng = np.random.default_rng(0)
    tokens, draft = rng.integers(0, 2, (500, 5)), rng.integers(0, 2, (500, 4))
    count = rng.integers(0, 5, 500)
    got = agreed(*(torch.from_numpy(a).to(device) for a in (tokens, draft, count)))
    want = [
        greedy_accept(row[: n + 1], drafts[:n].tolist()).committed
        for row, drafts, n in zip(tokens, draft, count, strict=True)
    ]
    assert got.tolist() == want and set(want) == {1, 2, 3, 4, 5}


@on_devices
def test_a_row_is_cut_where_the_host_would_end_it(device: str) -> None:
    """Random rows, stop sets and limits against the output buffer that decides on the host."""
    rng = np.random.default_rng(1)
    rows = 600
    tokens, count = rng.integers(0, 6, (rows, 4)), rng.integers(1, 5, rows)
    stops = [sorted({int(t) for t in rng.integers(0, 12, rng.integers(0, 3))}) for _ in range(rows)]
    limits = np.maximum(count, rng.integers(1, 7, rows))  # drafts never reach past the limit
    made = registers(
        [entry(i, GREEDY, stop_ids=s, room=int(m)) for i, (s, m) in enumerate(zip(stops, limits, strict=True))], device
    )
    yes, row = torch.ones(rows, dtype=torch.bool, device=device), torch.arange(rows, device=device)
    verdict = cut(torch.from_numpy(tokens).to(device), torch.from_numpy(count).to(device), yes, ~yes, made, row)
    ended = 0
    for i in range(rows):
        buffer = OutputBuffer(GREEDY, EndRules(frozenset(stops[i]), frozenset(), int(limits[i])), None)
        for token in tokens[i, : count[i]]:
            if buffer.push(int(token), None):
                break
        assert verdict.emitted[i] == len(buffer.token_ids)
        assert bool(verdict.ended[i]) == (buffer.finish_reason is not None)
        ended += bool(verdict.ended[i])
    assert 100 < ended < 500


@on_devices
def test_a_row_that_has_ended_or_is_broken_emits_nothing(device: str) -> None:
    made = registers([entry(i, GREEDY) for i in range(3)], device)
    tokens, count = torch.ones((3, 2), dtype=torch.int64), torch.tensor([2, 2, 2])
    alive, broken = torch.tensor([True, False, True]), torch.tensor([False, False, True])
    given = (tensor.to(device) for tensor in (tokens, count, alive, broken))
    verdict = cut(*given, made, torch.arange(3, device=device))
    assert verdict.emitted.tolist() == [2, 0, 0]
    assert verdict.ended.tolist()[::2] == [False, True]
