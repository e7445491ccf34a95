"""What each of two ranks on two GPUs runs for `test_sum_ranks_gpu`: calls of the sum over ranks, judged in float64.

A finding is a name and what was seen; the test says what it must be. No test here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, distributed

from trtllm_replayssm.ops.native_ranks import Inboxes
from trtllm_replayssm.runtime.session.ranks import ProcessRanks
from trtllm_replayssm.weights.tensor_parallel import TensorParallel

SIZE, EPS = 2, 1e-6
ROWS = 300  # of an inbox
CHANNELS = 2560
SLOW = 200_000_000  # clock cycles, 0.1 s and more
Finding = dict[str, Any]


class Rank:
    """One rank with inboxes of a type; every rank draws the same numbers and takes its own part of them."""

    def __init__(self, ranks: ProcessRanks, act: torch.dtype, channels: int = CHANNELS) -> None:
        self.rank, self.device = ranks.parallel.rank, torch.device("cuda", ranks.parallel.rank)
        opened = ranks.inboxes(ROWS, channels, act, self.device)
        assert opened is not None, "no inboxes between these GPUs"
        self.inboxes: Inboxes = opened
        self.act, self.channels = act, channels
        self.generator = torch.Generator().manual_seed(11)

    def draw(self, *shape: int) -> Tensor:
        """The same on all ranks."""
        return torch.randn(shape, generator=self.generator).to(self.act)

    def addends(self, rows: int) -> list[Tensor]:
        """Every rank's [rows, channels], with zeros of both signs among them."""
        every = [self.draw(rows, self.channels) for _ in range(SIZE)]
        every[0][:, :40], every[1][:, 8:48] = -0.0, -0.0
        every[0][:, 40:48] = 0.0
        return every

    def call(self, rows: int, *, in_place: bool = False, strided: bool = False) -> tuple[Tensor, Tensor, float, float]:
        """-> total, its norm, and how far both are from float64, in units of what the type allows."""
        addends, residual, weight = self.addends(rows), self.draw(rows, self.channels), self.draw(self.channels).float()
        wanted = sum(x.double() for x in addends) + residual.double()
        own, before = addends[self.rank].to(self.device), residual.to(self.device)
        if strided:
            own = torch.cat([own, own], dim=-1)[:, : self.channels]
        total = before if in_place else torch.full_like(before, float("nan"))
        out = self.inboxes.add_rms_norm(own, before, total, weight.to(self.device), EPS, unit_offset=True)
        return total, out, *self.errors(total, out, wanted, weight)

    def errors(self, total: Tensor, out: Tensor, wanted: Tensor, weight: Tensor) -> tuple[float, float]:
        """Of a sum rounded once, and of the norm of what was stored."""
        step = torch.finfo(self.act).eps
        stored = total.double().cpu()
        normal = stored * (stored.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight.double() + 1.0)
        return (
            float(((stored - wanted).abs() / (wanted.abs() * step / 2 + 1e-5)).max()),
            float(((out.double().cpu() - normal).abs() / (normal.abs() * (step / 2 + 1e-5) + 1e-6)).max()),
        )

    def agree(self, *tensors: Tensor) -> bool:
        """Whether every rank has the same bits."""
        torch.cuda.synchronize()
        mine = torch.cat([t.contiguous().flatten().view(torch.uint8) for t in tensors])
        every = [torch.empty_like(mine) for _ in range(SIZE)]
        distributed.all_gather(every, mine)
        return all(torch.equal(other, mine) for other in every)


def single_calls(rank: Rank) -> Finding:
    """Row counts that come and go, so that the halves of rows are at different turns; in place and strided too."""
    worst, agreed = [0.0, 0.0], True
    for number, rows in enumerate((1, 7, 1, 2, 300, 3, 256, 1, 128, 5, 300, 2)):
        total, out, *errors = rank.call(rows, in_place=number % 3 == 1, strided=number % 3 == 2)
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        agreed &= rank.agree(total, out)
    return {"sum": worst[0], "norm": worst[1], "agreed": agreed, "marked": _marked(rank)}


def plain_sums(rank: Rank) -> Finding:
    """Without residual and norm."""
    addends = rank.addends(33)
    total = rank.inboxes.add_up(addends[rank.rank].to(rank.device))
    wanted = sum(x.double() for x in addends)
    step = torch.finfo(rank.act).eps
    error = float(((total.double().cpu() - wanted).abs() / (wanted.abs() * step / 2 + 1e-5)).max())
    return {"sum": error, "agreed": rank.agree(total)}


def recorded(rank: Rank) -> Finding:
    """Three sums in a graph, replayed with other inputs while one rank or the other comes late."""
    own = torch.zeros(64, rank.channels, dtype=rank.act, device=rank.device)
    residual, weight = torch.zeros_like(own), torch.ones(rank.channels, device=rank.device)
    totals = [torch.zeros_like(own) for _ in range(3)]

    def work() -> Tensor:
        x = residual
        for total in totals:
            x = rank.inboxes.add_rms_norm(own, x, total, weight, EPS, unit_offset=False)
        return x

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        last = work()
    agreed, same = True, True
    for number in range(40):
        addends = rank.addends(64)
        own.copy_(addends[rank.rank])
        residual.copy_(rank.draw(64, rank.channels))
        if number % 4 == rank.rank:
            torch.cuda._sleep(SLOW)
        graph.replay()
        kept = [t.clone() for t in (*totals, last)]
        again = work()
        same &= torch.equal(again, kept[3]) and all(torch.equal(a, b) for a, b in zip(totals, kept, strict=False))
        agreed &= rank.agree(*kept)
    return {"agreed": agreed, "same": same, "finite": bool(last.isfinite().all())}


def many(rank: Rank) -> Finding:
    """Thousands of sums without a look in between: whatever a rank reads too early or late shows at the end."""
    x = torch.full((256, rank.channels), 1.0 + rank.rank, dtype=rank.act, device=rank.device)
    total = torch.zeros_like(x)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    for number in range(3000):
        rows = 1 + number * 37 % 256
        x[:rows] = float(number % 50 + rank.rank)
        rank.inboxes._launch(x[:rows], None, None, total[:rows], None, 0.0, unit_offset=False)
        wrong += (total[:rows] != float(2 * (number % 50) + 1)).sum()
    return {"wrong": int(wrong), "marked": _marked(rank)}


def given_up(rank: Rank) -> Finding:
    """Rank 1 does not come: rank 0 waits as long as it was told, then has NaN, and waits no more."""
    impatient = Inboxes(
        rank.rank, rank.inboxes.own, rank.inboxes.addresses, rank.inboxes.turn, rank.inboxes.gave_up, 0.5,
        rank.inboxes.mapping,
    )  # fmt: skip
    x = torch.ones(4, rank.channels, dtype=rank.act, device=rank.device)
    found: Finding = {"nan": [], "seconds": []}
    for _ in range(2 if rank.rank == 0 else 0):
        begun = time.monotonic()
        total = impatient.add_up(x)
        found["nan"].append(bool(total.isnan().all()))
        found["seconds"].append(time.monotonic() - begun)
    torch.cuda.synchronize()
    return found | {"gave_up": int(rank.inboxes.gave_up.item())}


def _marked(rank: Rank) -> bool:
    """Whether every word of the inbox waits for the next call."""
    torch.cuda.synchronize()
    return bool((rank.inboxes.own.view(torch.int16) == -0x8000).all())


def run_rank(number: int, store: str, answers: Connection) -> None:
    """All findings, as they come: (name, finding)."""
    torch.cuda.set_device(number)
    distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=number, world_size=SIZE, timeout=timedelta(seconds=100)
    )
    works: tuple[Callable[[Rank], Finding], ...] = (single_calls, plain_sums, recorded, many, given_up)
    ranks = {name: ProcessRanks(TensorParallel(SIZE, number)) for name in ("bfloat16", "float16", "nemotron")}
    cases = [(Rank(ranks["bfloat16"], torch.bfloat16), works), (Rank(ranks["float16"], torch.float16), works[:2])]
    cases.append((Rank(ranks["nemotron"], torch.bfloat16, 3136), works[:1]))
    for rank, wanted in cases:
        for work in wanted:
            answers.send((f"{work.__name__} {rank.act} {rank.channels}", work(rank)))
    answers.send(None)
