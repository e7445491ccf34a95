"""Times on the device: a CUDA graph of launches, cold L2 by rotation, cases that take turns, medians with spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_Work = Callable[[torch.Tensor, torch.Tensor], None]
_WARM_UP = 3
_COPY_BYTES = 4 << 30
_HOST_COPY_BYTES = 64 << 20


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


def copy_bandwidth(device: torch.device | None = None) -> float:
    """Bytes a second of a large copy, read and written bytes counted; eager, as a graph's copy node is slower."""
    target_device = torch.device("cuda") if device is None else device
    on_host = target_device.type == "cpu"
    source = torch.empty(_HOST_COPY_BYTES if on_host else _COPY_BYTES, dtype=torch.uint8, device=target_device).fill_(1)
    target = torch.empty_like(source)
    copy = _host_seconds if on_host else _device_seconds
    return float(statistics.median(2.0 * source.numel() / copy(source, target) for _ in range(8)))


def product_rate(device: torch.device | None = None) -> float:
    """Operations a second (a multiplication and an addition are two) of a large bfloat16 matrix product."""
    target_device = torch.device("cuda") if device is None else device
    size = 256 if target_device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=target_device) for _ in range(2))
    out = torch.empty_like(a)

    def multiply(_source: torch.Tensor, _target: torch.Tensor) -> None:
        torch.mm(a, b, out=out)

    measure = _host_seconds if target_device.type == "cpu" else _device_seconds
    return float(statistics.median(2.0 * size**3 / measure(a, out, multiply) for _ in range(12)))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _device_seconds(source: torch.Tensor, target: torch.Tensor, work: _Work = _copy) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work(source, target)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3


def _host_seconds(source: torch.Tensor, target: torch.Tensor, work: _Work = _copy) -> float:
    began = time.perf_counter()
    work(source, target)
    return time.perf_counter() - began


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
