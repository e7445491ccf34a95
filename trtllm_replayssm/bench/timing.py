"""Times on the device: a CUDA graph of launches, cold L2 by rotation, cases that take turns, medians with spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_WARM_UP = 3
_COPY_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds a launch: median and quartiles over the replays."""

    median: float
    low: float
    high: float


def time_cases(cases: Sequence[tuple[Callable[[], None], int]], rounds: int) -> list[Timing]:
    """cases: a function that enqueues launches on the current stream, and how many. They take turns in every round, so
    that clocks and temperature treat them alike.
    """
    graphs = [_capture(enqueue) for enqueue, _ in cases]
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[list[float]] = [[] for _ in cases]
    for turn in range(rounds + _WARM_UP):
        for graph, (_, launches), found in zip(graphs, cases, times, strict=True):
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if turn >= _WARM_UP:
                found.append(start.elapsed_time(stop) * 1e3 / launches)
    return [_timing(found) for found in times]


def copy_bandwidth() -> float:
    """Bytes a second of a large copy, read and written bytes counted; eager, as a graph's copy node is slower."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rates: list[float] = []
    for _ in range(8):
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        rates.append(2.0 * _COPY_BYTES / (start.elapsed_time(stop) * 1e-3))
    return float(statistics.median(rates))


def _capture(enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        enqueue()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    return graph


def _timing(found: list[float]) -> Timing:
    ordered = sorted(found)
    return Timing(statistics.median(ordered), ordered[len(ordered) // 4], ordered[len(ordered) * 3 // 4])
