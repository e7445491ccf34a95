"""What skipping faded checkpoints costs and saves on a GPU: times here, bytes from the profiler's counters.

A run with `repeats=0` does each step once with the plain update and once with the skipping one, in the order of the
rows, and these launches alone lie between the profiler's start and stop; `add_counters` puts its numbers beside them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.evaluation.skip_problem import SkipCase, SkipProblem

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
_SKIPPING = "skipping"  # in the names of the kernels that skip, in no other's
_WAIT_CYCLES = 1 << 24  # the device waits until all timed launches are queued, so that none waits for the host
_UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}


def skip_rows(
    problem: SkipProblem, cases: Sequence[SkipCase], records: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each case and number h of committed records: share of faded heads, microseconds of both updates.

    repeats: timed launches of each, in turn; 0: one launch of each and no times.
    """
    rows = []
    for case in cases:
        for h in records:
            problem.place(case, h)
            faded = case.faded(h, problem.window)
            row: dict[str, Any] = {
                "case": case.name, "skip_below": case.skip_below, "window": problem.window, "rows": problem.rows,
                "h": h, "flushes": h + 1 > problem.window, "faded": round(float(faded.float().mean()), 4),
                "state_bytes": problem.state_bytes,
            }  # fmt: skip
            if repeats:
                row |= _times(problem, case.skip_below, repeats)
            else:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                problem.step(None)
                problem.step(case.skip_below)
                torch.cuda.profiler.stop()
            rows.append(row)
    return rows


def _times(problem: SkipProblem, skip_below: float, repeats: int) -> dict[str, float]:
    """Median microseconds of the plain and the skipping update, launched in turn."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(repeats + 2)]
    torch.cuda._sleep(_WAIT_CYCLES)
    for a, b, c, d in events:
        a.record()
        problem.step(None)
        b.record()
        c.record()
        problem.step(skip_below)
        d.record()
    torch.cuda.synchronize()
    plain, skipping = (
        median(1e3 * first.elapsed_time(second) for first, second in pairs[2:])
        for pairs in ([(a, b) for a, b, _, _ in events], [(c, d) for _, _, c, d in events])
    )
    return {"plain_us": round(plain, 2), "skipping_us": round(skipping, 2)}


def add_counters(rows: list[dict[str, Any]], path: Path) -> None:
    """Put the DRAM bytes of a profile of the same cases beside the rows: `ncu --csv --page raw --metrics READ,WRITE`.

    Raises ConfigError unless the profile has exactly a plain and a skipping launch for each row, in that order.
    """
    text = path.read_text(encoding="utf-8")
    lines = list(csv.DictReader(text[text.index('"ID"') :].splitlines())) if '"ID"' in text else []
    units, launches = (lines[0], lines[1:]) if lines else ({}, [])
    skipping = [_SKIPPING in line["Kernel Name"] for line in launches]
    if skipping != [False, True] * len(rows):
        raise ConfigError(
            "eval skip", f"--counters {path}", expected=f"{2 * len(rows)} launches, plain and skipping in turn",
            got=f"{len(launches)}, {sum(skipping)} of them skipping",
            hint="Profile a run of the same cases with --repeats 0 and ncu --profile-from-start off",
        )  # fmt: skip
    for i, row in enumerate(rows):
        for name, line in zip(("plain", "skipping"), launches[2 * i : 2 * i + 2], strict=True):
            row[f"{name}_read_bytes"], row[f"{name}_write_bytes"] = (
                round(float(line[metric].replace(",", "")) * _UNITS[units[metric]]) for metric in (READ, WRITE)
            )
