"""The sum over ranks with its ranks on one device, a stream each: everything but the link between GPUs.

Oracle O1: float64, the sum rounded once; the norm is that of the stored sum. Every rank must have the same bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from tests.native import harness

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable())),
    pytest.mark.usefixtures("installed_library"),
]  # fmt: skip

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.ops.native_ranks import MARK, Inboxes

EPS, CAPACITY, CHANNELS = 1e-6, 96, 2560
EXACT = 1.001  # in units of half a step of the type: rounding to nearest, after float32
LATE = 100_000_000  # clock cycles
# Rows of all ranks that wait, at most, a block each: one multiprocessor of 132 must be left. A kernel that divides a
# multiprocessor's memory in another way (a sleep, a fill) starts on none that holds a waiting block.
BESIDE = 128


# Beside twenty processes, with which the GPU takes turns, a rank's kernel was seen to start when the others had given
# up, after 20 s; with the GPU to itself it was not.
side_by_side = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="ranks side by side want the GPU to themselves: run this without -n"
)


class Ranks:
    """The inboxes of all ranks, and a stream for each."""

    def __init__(self, size: int, act: str, channels: int = CHANNELS, patience: float = 20.0) -> None:
        self.size, self.act, self.channels = size, getattr(torch, act), channels
        shape = (size, 2, size, CAPACITY, channels)
        self.memory = torch.full(shape, MARK, dtype=self.act, device="cuda")
        addresses = tuple(part.data_ptr() for part in self.memory)
        self.gave_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.inboxes = [
            Inboxes(
                rank, self.memory[rank], addresses, torch.zeros(CAPACITY, dtype=torch.int32, device="cuda"),
                self.gave_up, patience,
            )
            for rank in range(size)
        ]  # fmt: skip
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        self.generator = torch.Generator("cuda").manual_seed(5)
        torch.cuda.synchronize()

    def draw(self, *shape: int) -> Any:
        return torch.randn(shape, generator=self.generator, device="cuda").to(self.act)

    def addends(self, rows: int) -> list[Any]:
        """With zeros of both signs where other ranks have numbers, zeros or the same."""
        every = [self.draw(rows, self.channels) for _ in range(self.size)]
        every[0][:, :40], every[-1][:, 8:48], every[0][:, 40:48] = -0.0, -0.0, 0.0
        return every

    def rehearse(self, work: Any) -> None:
        """work(rank) on every rank's stream, waiting for nobody, and nothing of it is left but what it writes itself.

        What has to wait on one device for the kernels that run is behind it then, kernels that are loaded, memory that
        is mapped, graphs that are uploaded: a rank that another one waits for would never get there.
        """
        torch.cuda.synchronize()
        turns = [inbox.turn.clone() for inbox in self.inboxes]
        self.gave_up.fill_(1)
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                work(rank)
        torch.cuda.synchronize()
        self.gave_up.fill_(0)
        self.memory.fill_(MARK)
        for inbox, turn in zip(self.inboxes, turns, strict=True):
            inbox.turn.copy_(turn)

    def together(self, work: Any) -> list[Any]:
        """work(rank) on every rank's stream -> the results, there for all. Nothing but kernels that were rehearsed."""
        torch.cuda.synchronize()
        results = []
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                results.append(work(rank))
        torch.cuda.synchronize()
        return results

    def check(self, results: list[tuple[Any, Any]], addends: list[Any], residual: Any, weight: Any) -> None:
        """results: total and norm of each rank."""
        half = torch.finfo(self.act).eps / 2
        wanted = sum(x.double() for x in addends) + residual.double()
        total, out = results[0]
        assert ((total.double() - wanted).abs() <= wanted.abs() * half * EXACT + 1e-5).all()
        stored = total.double()
        normal = stored * (stored.square().mean(-1, keepdim=True) + EPS).rsqrt() * (weight.double() + 1.0)
        assert ((out.double() - normal).abs() <= normal.abs() * (half * EXACT + 1e-5) + 1e-6).all()
        for others in results[1:]:
            for ours, theirs in zip(others, results[0], strict=True):
                assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))

    def marked(self) -> bool:
        """Whether every word of every inbox waits for the next call."""
        return bool((self.memory.view(torch.int16) == -0x8000).all()) and self.gave_up.item() == 0


@pytest.fixture(params=[(2, "bfloat16", 2560), (3, "float16", 3136), (4, "bfloat16", 264)], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield Ranks(*request.param)


@side_by_side
def test_sums_are_rounded_once_and_normalised_and_equal_on_all_ranks(ranks: Ranks) -> None:
    """Row counts come and go, so that rows are at different turns; in place, strided and late ones among the calls."""
    most = min(BESIDE // (ranks.size - 1), CAPACITY)
    for number, rows in enumerate((1, 7, 1, 2, most, 3, most - 3, 1, 33, 5, most, 2)):
        addends, residual, weight = ranks.addends(rows), ranks.draw(rows, ranks.channels), ranks.draw(ranks.channels)
        weight, own = weight.float(), addends
        if number % 3 == 2:
            own = [torch.cat([part, part], dim=-1)[:, : ranks.channels] for part in addends]
        before = [residual.clone() for _ in addends]
        totals = before if number % 3 == 1 else [torch.empty_like(residual) for _ in addends]

        def work(rank: int) -> tuple[Any, Any]:
            if (number + rank) % 4 == 0:  # noqa: B023
                torch.cuda._sleep(LATE)
            sources = own[rank], before[rank], totals[rank]  # noqa: B023
            return totals[rank], ranks.inboxes[rank].add_rms_norm(*sources, weight, EPS, unit_offset=True)  # noqa: B023

        ranks.rehearse(work)
        for source, total in zip(before, totals, strict=True):  # perhaps the same
            total.fill_(float("nan"))
            source.copy_(residual)
        ranks.check(ranks.together(work), addends, residual, weight)
    assert ranks.marked()


@side_by_side
def test_a_sum_needs_no_residual_and_no_norm(ranks: Ranks) -> None:
    addends = ranks.addends(33)

    def work(rank: int) -> Any:
        return ranks.inboxes[rank].add_up(addends[rank])

    ranks.rehearse(work)
    totals = ranks.together(work)
    wanted, half = sum(x.double() for x in addends), torch.finfo(ranks.act).eps / 2
    assert ((totals[0].double() - wanted).abs() <= wanted.abs() * half * EXACT + 1e-5).all()
    assert all(torch.equal(total.view(torch.int16), totals[0].view(torch.int16)) for total in totals)
    assert ranks.marked()


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
def test_words_that_have_come_are_taken_without_waiting(act: str) -> None:
    """One rank after another, nothing side by side, as a tool that serialises kernels needs it."""
    ranks = Ranks(3, act, channels=264)
    addends, residual = ranks.addends(5), ranks.draw(5, 264)
    weight, total = ranks.draw(264).float(), torch.empty_like(residual)
    ranks.gave_up.fill_(1)
    for rank in (1, 2):
        assert ranks.inboxes[rank].add_up(addends[rank]).isnan().all()
    ranks.gave_up.fill_(0)
    out = ranks.inboxes[0].add_rms_norm(addends[0], residual, total, weight, EPS, unit_offset=True)
    ranks.check([(total, out)], addends, residual, weight)
    assert ranks.gave_up.item() == 0 and (ranks.memory[0].view(torch.int16) == -0x8000).all()


@side_by_side
def test_replays_give_what_single_calls_give() -> None:
    """Three sums, each after the other, in a graph of every rank."""
    ranks, rows = Ranks(2, "bfloat16"), BESIDE // 3  # three sums may be there at once, two that wait for the first
    own = [torch.zeros(rows, CHANNELS, dtype=ranks.act, device="cuda") for _ in range(2)]
    residual, weight = torch.zeros_like(own[0]), torch.ones(CHANNELS, device="cuda")
    totals = [[torch.zeros_like(residual) for _ in range(3)] for _ in range(2)]

    def work(rank: int) -> Any:
        x = residual
        for total in totals[rank]:
            x = ranks.inboxes[rank].add_rms_norm(own[rank], x, total, weight, EPS, unit_offset=False)
        return x

    ranks.rehearse(work)
    graphs, last = [], []
    for rank, stream in enumerate(ranks.streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            last.append(work(rank))
        graphs.append(graph)
    for number in range(20):
        for x, drawn in zip((*own, residual), (*ranks.addends(rows), ranks.draw(rows, CHANNELS)), strict=True):
            x.copy_(drawn)

        def replay(rank: int) -> None:
            if number % 3 == rank:  # noqa: B023
                torch.cuda._sleep(LATE)
            graphs[rank].replay()

        if number == 0:
            ranks.rehearse(replay)
        ranks.together(replay)
        kept = [t.clone() for t in (*totals[0], last[0])]
        assert all(torch.equal(a, b) for a, b in zip((*totals[1], last[1]), kept, strict=True))
        again = ranks.together(work)
        assert torch.equal(again[0], kept[3]) and torch.equal(again[1], kept[3])
        assert all(torch.equal(a, b) for a, b in zip(totals[0], kept[:3], strict=True))
    assert ranks.marked()


@side_by_side
def test_nothing_is_read_too_early_or_twice_in_thousands_of_sums() -> None:
    ranks, wrong = Ranks(2, "bfloat16"), torch.zeros(2, dtype=torch.int64, device="cuda")
    x = torch.zeros(2, CAPACITY, CHANNELS, dtype=ranks.act, device="cuda")

    def step(rank: int, number: int) -> None:
        own = x[rank, : 1 + number * 37 % CAPACITY]
        own.fill_(float(number % 50 + rank))
        total = ranks.inboxes[rank].add_up(own)
        wrong[rank] += (total != float(2 * (number % 50) + 1)).sum()

    # Neither rank's launches may fill its queue, where the thread would wait inside the driver and lock out the other.
    abreast = Barrier(2, timeout=60)

    def work(rank: int) -> None:
        with torch.cuda.stream(ranks.streams[rank]):
            for number in range(1500):
                if number % 25 == 0:
                    abreast.wait()
                step(rank, number)

    ranks.rehearse(lambda rank: [step(rank, number) for number in range(CAPACITY)])  # all sizes
    wrong.zero_()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0] and ranks.marked()


def test_a_rank_that_does_not_come_is_given_up() -> None:
    ranks = Ranks(2, "bfloat16", patience=0.5)
    x, seconds = ranks.draw(4, CHANNELS), []
    for _ in range(2):
        begun = time.monotonic()
        assert ranks.inboxes[0].add_up(x).isnan().all()
        seconds.append(time.monotonic() - begun)
    assert ranks.gave_up.item() == 1
    assert 0.4 < seconds[0] < 5.0 and seconds[1] < 0.4, "the second call waits for nobody"


def test_who_is_told_to_give_up_comes_back_at_once() -> None:
    ranks = Ranks(2, "bfloat16")
    total = ranks.inboxes[1].add_up(ranks.draw(4, CHANNELS))
    time.sleep(0.1)
    begun = time.monotonic()
    ranks.gave_up.fill_(1)
    assert total.isnan().all() and time.monotonic() - begun < 2.0
