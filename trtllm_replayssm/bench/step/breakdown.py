"""Where a step's time goes: kernels by name, from a profiled run beside the timed one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

Interval = tuple[str, float, float]
OTHER = "other"
# First match wins. Names of our own kernels (plugins/kernels), of torch's flash attention, and of cuBLAS and CUTLASS.
_PARTS = (
    ("SSM", re.compile(r"UpdateKernel|narrowGdnKernel|conventionalKernel|skipping\w*Kernel")),
    ("convolution", re.compile(r"ssmInputsKernel")),
    ("experts", re.compile(r"\b(grouped|deep|plan|reduce|route)Kernel")),
    ("attention", re.compile(r"\b((wideA|a)ttention\w*|merge)Kernel|flash|fmha")),
    ("GEMM", re.compile(r"gemm|gemv|nvjet|cutlass|splitk|cublas|xmma", re.IGNORECASE)),
)
PARTS = (*(name for name, _ in _PARTS), OTHER)


def part_of(kernel: str) -> str:
    """The part of the step that a kernel belongs to, by its name."""
    return next((name for name, pattern in _PARTS if pattern.search(kernel)), OTHER)


def add_up(kernels: Iterable[tuple[str, float]], steps: int) -> dict[str, float]:
    """(kernel, microseconds) of `steps` steps -> microseconds a step by part, in the order of PARTS."""
    total = dict.fromkeys(PARTS, 0.0)
    for kernel, us in kernels:
        total[part_of(kernel)] += us / steps
    return total


def alone(kernels: Iterable[Interval]) -> list[tuple[str, float]]:
    """(kernel, begin, end) in microseconds -> (kernel, time after every earlier one has ended), in order of beginning.

    A kernel of a programmatic launch begins while the one before it runs, and waits: that time is the other's.
    """
    found, reached = [], float("-inf")
    for name, begin, end in sorted(kernels, key=lambda kernel: kernel[1:]):
        found.append((name, max(end - max(begin, reached), 0.0)))
        reached = max(reached, end)
    return found


def profile_steps(run: Callable[[], object], steps: int) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Run `steps` steps under the profiler -> microseconds a step by part, and by kernel, the slowest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    intervals = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events() if _on_device(e)]
    kernels = alone(intervals)
    by_kernel: defaultdict[str, float] = defaultdict(float)
    for name, us in kernels:
        by_kernel[name] += us / steps
    return add_up(kernels, steps), sorted(by_kernel.items(), key=lambda kernel: -kernel[1])


def _on_device(event: Any) -> bool:
    return bool(event.device_type.name == "CUDA")
