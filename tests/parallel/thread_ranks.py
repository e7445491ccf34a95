"""Ranks that are threads of one process, for walking the work of several in lockstep. No test here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from trtllm_replayssm.weights.tensor_parallel import TensorParallel

SECONDS = 60.0  # a rank that fails leaves the others waiting
T = TypeVar("T")


class _Meeting:
    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size, timeout=SECONDS)
        self.given: list[Any] = [None] * size


class ThreadRanks:
    """Implements `ranks.Ranks`; every rank's thread calls alike. calls: how often this one met the others."""

    def __init__(self, parallel: TensorParallel, meeting: _Meeting) -> None:
        self.parallel = parallel
        self.calls = 0
        self._meeting = meeting

    def exchange(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, rank after rank."""
        self.calls += 1
        self._meeting.given[self.parallel.rank] = x.clone()
        self._meeting.barrier.wait()
        all_of_them = list(self._meeting.given)
        self._meeting.barrier.wait()
        assert len({(t.shape, t.dtype) for t in all_of_them}) == 1, "the ranks no longer agree"
        return all_of_them

    def add_up(self, x: Tensor) -> Tensor:
        first, *others = self.exchange(x)
        for other in others:
            first = first + other
        return first

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(self.exchange(x), dim=-1)

    def inboxes(self, rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        return None

    def communicator(self) -> Any:
        return object()


def thread_ranks(size: int) -> list[ThreadRanks]:
    meeting = _Meeting(size)
    return [ThreadRanks(TensorParallel(size, rank), meeting) for rank in range(size)]


def on_all(work: Callable[[int], T], size: int) -> list[T]:
    """work(rank) in a thread per rank -> the answers; raises what a rank raised."""
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(work, rank) for rank in range(size)]]
