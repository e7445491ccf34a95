"""Times of a step loop, blocks of steps between two events, and of short bursts of work with pauses between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from trtllm_replayssm.errors import InvariantError


@dataclass(frozen=True, slots=True)
class StepTime:
    """Microseconds a step: median and quartiles over the timed blocks."""

    median: float
    low: float
    high: float


class _Stopwatch(Protocol):
    def mark(self) -> None: ...

    def microseconds(self) -> list[float]: ...


class _Events:
    """Device events in the stream: the host runs ahead."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def microseconds(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [1e3 * first.elapsed_time(second) for first, second in pairs]


class _Clock:
    """The host's clock, for devices that finish a step before it returns."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def mark(self) -> None:
        self._times.append(time.perf_counter())

    def microseconds(self) -> list[float]:
        pairs = zip(self._times, self._times[1:], strict=False)
        return [1e6 * (second - first) for first, second in pairs]


def _stopwatch(device: torch.device) -> _Stopwatch:
    return _Events() if device.type == "cuda" else _Clock()


def time_bursts(run: Callable[[], object], device: torch.device, *, bursts: int, rest: float) -> float:
    """Microseconds of `run`, the median of so many, with pauses of `rest` times its length between them.

    Each is preceded by an untimed one, which wakes the device and hides that the host starts the timed one.
    """
    found = []
    for _ in range(bursts):
        watch = _stopwatch(device)
        run()
        watch.mark()
        run()
        watch.mark()
        found += watch.microseconds()
        time.sleep(rest * 1e-6 * found[-1])
    return statistics.median(found)


def time_steps(run: Callable[[], torch.Tensor], *, block: int, rounds: int) -> StepTime:
    """Time rounds * block steps. Raises InvariantError when the last logits are not finite: nothing was measured."""
    logits = run()
    watch = _stopwatch(logits.device)
    watch.mark()
    for _ in range(rounds):
        for _ in range(block):
            logits = run()
        watch.mark()
    ordered = sorted(us / block for us in watch.microseconds())
    if not bool(torch.isfinite(logits).all()):
        raise InvariantError("bench step", "logits", expected="finite numbers", got="NaN or infinity")
    return StepTime(statistics.median(ordered), ordered[len(ordered) // 4], ordered[len(ordered) * 3 // 4])
