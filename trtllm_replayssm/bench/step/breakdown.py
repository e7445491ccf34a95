"""Where a step's time goes: kernels by name, from a profiled run beside the timed one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

OTHER = "other"
# First match wins. Names of our own kernels (plugins/kernels), of torch's flash attention, and of cuBLAS and CUTLASS.
_PARTS = (
    ("SSM", re.compile(r"UpdateKernel|conventionalKernel|skipping\w*Kernel")),
    ("convolution", re.compile(r"ssmInputsKernel")),
    ("experts", re.compile(r"\b(grouped|plan|reduce|route)Kernel")),
    ("attention", re.compile(r"\b(attention\w*|merge)Kernel|flash|fmha")),
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


def profile_steps(run: Callable[[], object], steps: int) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Run `steps` steps under the profiler -> microseconds a step by part, and by kernel, the slowest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    kernels: list[tuple[str, float]] = [(e.key, _microseconds(e)) for e in profiler.key_averages()]
    by_kernel = sorted(((name, us / steps) for name, us in kernels if us), key=lambda k: -k[1])
    return add_up(kernels, steps), by_kernel


def _microseconds(event: Any) -> float:
    return float(event.self_device_time_total)
