"""Runs benchmark cases: gate, times, one result per way of accepting tokens. No speed without a green gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.gate import GateResult, run_gate
from trtllm_replayssm.bench.problem import Committed, LaunchMode, Problem
from trtllm_replayssm.bench.timing import Timing, time_cases
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.ops import _abi

PROGRAMMATIC_ROWS = 8  # up to this batch the launch is a large part: one without the promise is timed as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Mean microseconds of a launch over a steady window in which every step keeps `accepted` tokens.

    staggered: of launches whose rows stand at all places of that window, as in serving; None: fewer rows than places,
    or one place. floor_us: the same bytes at the measured copy bandwidth. conventional_us: our conventional standard
    step (T = 1) at this batch in the same run, and snapshots_us the conventional verification of as many tokens; None:
    not timed.
    """

    case: KernelCase
    accepted: int
    mode: LaunchMode
    timing: Timing
    by_h: dict[int, float]
    staggered: Timing | None = None
    floor_us: float
    bytes: float
    conventional_us: float | None = None
    snapshots_us: float | None = None

    def fields(self) -> dict[str, Any]:
        """The result as a JSON object without the machine."""
        case = self.case
        gigabytes = self.bytes / self.timing.median * 1e-3
        share = round(100 * self.floor_us / self.timing.median, 1)
        found: dict[str, Any] = {
            "what": case.operation.value, "shape": case.shape_name, "B": case.rows, "T": case.tokens, "L": case.window,
            "recurrence": case.recurrence.value, "read": case.read.value if case.read else None,
            "accepted": self.accepted, "programmatic": self.mode is not LaunchMode.PLAIN,
            "settled": self.mode is LaunchMode.SETTLED, "us": round(self.timing.median, 3),
            "us_quartiles": [round(self.timing.low, 3), round(self.timing.high, 3)], "GBs": round(gigabytes, 1),
            "floor_us": round(self.floor_us, 2), "percent_of_copy_bandwidth": share, "percent_of_floor": share,
            "by_h": {str(h): round(us, 2) for h, us in self.by_h.items()},
        }  # fmt: skip
        if self.staggered is not None:
            found["staggered_us"] = round(self.staggered.median, 3)
        for name, other in (("conventional", self.conventional_us), ("snapshots", self.snapshots_us)):
            if other is not None:
                found[f"{name}_us"] = round(other, 3)
                found[f"over_{name}"] = round(self.timing.median / other, 3)
        return found


@dataclass(frozen=True, slots=True)
class Refusal:
    """A case that was not timed: the library has no kernel, or the gate is red."""

    case: KernelCase
    reason: str


Row = Result | Refusal | tuple[KernelCase, GateResult]


def run_cases(cases: Sequence[KernelCase], library: _abi.Library, bandwidth: float, *, rounds: int) -> Iterator[Row]:
    """Gates, results and refusals in order; bandwidth in bytes a second. Conventional cases should come first."""
    gates: dict[KernelCase, str | None] = {}
    standard: dict[tuple[str, int, int], float] = {}
    for case in cases:
        kind = replace(case, rows=0, suite="")
        if kind not in gates:
            gates[kind], shown = _gate(case, library)
            if shown is not None:
                yield case, shown
        refusal = gates[kind]
        if refusal is not None:
            yield Refusal(case, refusal)
            continue
        for result in _time(case, library, bandwidth, rounds):
            place = (case.shape_name, case.rows, case.tokens)
            if case.operation is Operation.CONVENTIONAL:
                standard[place] = min(standard.get(place, result.timing.median), result.timing.median)
            snapshots = standard.get(place) if case.tokens > 1 else None
            yield replace(result, conventional_us=standard.get((case.shape_name, case.rows, 1)), snapshots_us=snapshots)
        torch.cuda.empty_cache()


def entry(row: Row) -> dict[str, Any]:
    """A row as a JSON object; `green` is False where a gate is red."""
    if isinstance(row, Result):
        return row.fields()
    if isinstance(row, Refusal):
        return {"what": "refused", "case": row.case.name, "reason": row.reason}
    case, found = row
    return {"what": "gate", "case": case.name, **asdict(found), "green": found.green}


def _gate(case: KernelCase, library: _abi.Library) -> tuple[str | None, GateResult | None]:
    """Why the case must not be timed, or None; and what the gate found, where there is a kernel."""
    try:
        found = run_gate(case, library)
    except UnsupportedError as error:
        return f"not built: {str(error).splitlines()[0]}", None
    return (None if found.green else "the gate is red"), found


def _time(case: KernelCase, library: _abi.Library, bandwidth: float, rounds: int) -> Iterator[Result]:
    problem = Problem(case, library)
    runs = dict.fromkeys((case.tokens, 1) if case.operation is Operation.UPDATE else (case.tokens,))
    cycles = [case.cycle(accepted) for accepted in runs]
    depths: list[Committed] = [*sorted({h for cycle in cycles for h in cycle})]
    depths += [tuple(cycle) for cycle in cycles if 1 < len(cycle) <= case.rows]
    for mode in LaunchMode:
        if mode is not LaunchMode.PLAIN and case.operation is Operation.PREFILL:
            continue
        if mode is LaunchMode.PROGRAMMATIC and case.rows > PROGRAMMATIC_ROWS:
            continue
        timed = [(partial(problem.enqueue, h, mode), problem.launches) for h in depths]
        times = dict(zip(depths, time_cases(timed, rounds), strict=True))
        for accepted in runs:
            yield _result(case, accepted, mode, times, bandwidth)


def _result(
    case: KernelCase, accepted: int, mode: LaunchMode, times: dict[Committed, Timing], bandwidth: float
) -> Result:
    cycle = case.cycle(accepted)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    moved = mean([float(case.floor_bytes(h)) for h in cycle])
    timing = Timing(*(mean([getattr(times[h], part) for h in cycle]) for part in ("median", "low", "high")))
    return Result(
        case=case, accepted=accepted, mode=mode, timing=timing,
        by_h={h: times[h].median for h in sorted(set(cycle))}, staggered=times.get(tuple(cycle)),
        floor_us=moved / bandwidth * 1e6, bytes=moved,
    )  # fmt: skip
