"""Which tokens of a step count: drafts that agree, stop tokens, the length, rows that have ended or are broken."""

from __future__ import annotations

import numpy as np
import torch

from tests.device.requests import entry, on_devices, registers
from trtllm_replayssm.runtime.device.acceptance import accept_drawn, agreed, cut
from trtllm_replayssm.runtime.device.registers import BLOCK, Registers
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.output import EndRules, OutputBuffer
from trtllm_replayssm.spec.accept import accept_general, draw, greedy_accept

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


@on_devices
def test_drawn_drafts_are_accepted_and_replaced_as_the_general_rule_says(device: str) -> None:
    """2,000 rows of three drafts or fewer over a small vocabulary, p sharp and flat; all decisions are the host's."""
    rng, rows, drafts, vocab = np.random.default_rng(2), 2000, 3, 11
    p = rng.dirichlet(np.full(vocab, 0.5), (rows, drafts + 1)).astype(np.float32)
    q = (0.5 * p[:, :drafts] + 0.5 * rng.dirichlet(np.full(vocab, 0.5), (rows, drafts))).astype(np.float32)
    q[:100] = p[:100, :drafts]  # equal distributions: nothing is left over, every draft passes
    p[100:200, :, 5:] = 0.0
    draft = np.array([[draw(row.astype(np.float64), float(rng.random())) for row in each] for each in q])
    count = rng.integers(0, drafts + 1, rows)
    seeds = [int(s) for s in rng.integers(0, 2**63, rows)]
    made = Registers.allocate(rows, drafts, 0, torch.device(device), drawn_vocab=vocab)
    made.enter([
        entry(i, GREEDY, seed=seeds[i], tokens=[1] * 7, drafts=draft[i, :n].tolist(), q=q[i, :n].astype(np.float64))
        for i, n in enumerate(count)
    ])  # fmt: skip
    weights = torch.zeros((rows, drafts + 1, BLOCK), device=device)
    weights[..., :vocab] = torch.from_numpy(p * rng.uniform(0.5, 2, (rows, 1, 1)).astype(np.float32)).to(device)
    row = torch.arange(rows, device=device)
    tokens, counted = accept_drawn(weights, *(torch.from_numpy(a).to(device) for a in (draft, count)), made, row)
    accepted = set()
    for i, n in enumerate(count):
        want = accept_general(p[i, : n + 1], q[i, :n], draft[i, :n].tolist(), seeds[i], 7)
        assert tuple(tokens[i, : counted[i]].tolist()) == want.tokens, i
        accepted.add((int(n), want.accepted))
    assert accepted == {(n, a) for n in range(drafts + 1) for a in range(n + 1)}
    assert (counted[:100].cpu() == torch.from_numpy(count[:100]) + 1).all()
