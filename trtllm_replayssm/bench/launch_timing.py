"""Times of launches of an update against each other: gate first, then all in turns, and what follows from the times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from trtllm_replayssm.bench.cases import KernelCase
from trtllm_replayssm.bench.gate import run_gate
from trtllm_replayssm.bench.launch_candidates import Candidate, candidates
from trtllm_replayssm.bench.problem import LaunchMode, Problem
from trtllm_replayssm.bench.timing import Timing, time_cases
from trtllm_replayssm.launches import LaunchPlan, UpdateLaunch
from trtllm_replayssm.ops import _abi

CLOSE = 0.01  # a launch that is not faster than the library's own by this share is not taken: it may be noise
ROUNDS = 20

Timer = Callable[[Sequence[tuple[Callable[[], None], int]], int], list[Timing]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate with the mean microseconds of its steps over a steady window; None: the gate is red."""

    candidate: Candidate
    us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """launch: None: the library's own. why: lines for people."""

    launch: UpdateLaunch | None
    why: tuple[str, ...]


def tune_launch(case: KernelCase, accepted: int, library: _abi.Library) -> LaunchChoice:
    """Measure the case's launches on the current CUDA device, in steps that keep `accepted` tokens of each row."""
    problem = Problem(case, library)
    multiprocessors = int(torch.cuda.get_device_properties(problem.device).multi_processor_count)

    def planner(launch: UpdateLaunch | None) -> LaunchPlan:
        problem.launch = launch
        return problem.plan(multiprocessors)

    def green(launch: UpdateLaunch | None) -> bool:
        return run_gate(case, library, rows=(case.rows,), launch=launch).green

    def enqueue(launch: UpdateLaunch | None, h: int) -> None:
        problem.launch = launch
        problem.enqueue(h, LaunchMode.SETTLED)  # as a session launches it

    found = candidates(case, planner, multiprocessors)
    return choose_launch(measure(found, case.cycle(accepted), green, enqueue, problem.launches, time_cases))


def measure(
    found: Sequence[Candidate], depths: Sequence[int], green: Callable[[UpdateLaunch | None], bool],
    enqueue: Callable[[UpdateLaunch | None, int], None], launches: int, timer: Timer,
) -> list[Measured]:  # fmt: skip
    """Gate and time candidates; enqueue(launch, h) makes `launches` launches with h committed records.

    depths: h before each step of a cycle, each timed once. A candidate whose gate is red is not timed.
    """
    passed = [candidate for candidate in found if green(candidate.launch)]
    each = sorted(set(depths))
    work = [(partial(enqueue, candidate.launch, h), launches) for candidate in passed for h in each]
    times = iter(timer(work, ROUNDS))
    by_depth = {candidate.plan: {h: next(times).median for h in each} for candidate in passed}

    def mean(candidate: Candidate) -> float | None:
        known = by_depth.get(candidate.plan)
        return None if known is None else sum(known[h] for h in depths) / len(depths)

    return [Measured(candidate, mean(candidate)) for candidate in found]


def choose_launch(measured: Sequence[Measured], close: float = CLOSE) -> LaunchChoice:
    """The fastest launch where it beats the library's own, the first of `measured`, by more than `close`."""
    why = [_line(m) for m in measured]
    own = measured[0].us
    timed = [(m.us, m.candidate) for m in measured if m.us is not None]
    if own is None:
        return LaunchChoice(launch=None, why=(*why, "taken: the library's choice; as its gate is red, nothing counts"))
    best, candidate = min(timed, key=lambda pair: pair[0])
    if best >= (1.0 - close) * own:
        why.append(f"taken: the library's choice, none is faster by {close:.0%} than its {own:.2f} us")
        return LaunchChoice(launch=None, why=tuple(why))
    why.append(f"taken: {candidate.name}, {best:.2f} us; the library's choice: {own:.2f} us")
    return LaunchChoice(launch=candidate.launch, why=tuple(why))


def _line(measured: Measured) -> str:
    candidate = measured.candidate
    time = "its gate is red, not timed" if measured.us is None else f"{measured.us:.2f} us"
    return f"launch: {candidate.name}: {candidate.bytes / 1e6:.1f} MB, waves {candidate.waves:.3f}, {time}"
