"""What skipping faded checkpoints costs and saves on a GPU: times here, bytes from the profiler's counters.

A run with `repeats=0` does each step once with the plain update and once with the skipping one, in the order of the
rows, and these launches alone lie between the profiler's start and stop; `add_counters` puts its numbers beside them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.evaluation.decays import THRESHOLDS, measure_decays
from trtllm_replayssm.runtime.evaluation.forcing import Model
from trtllm_replayssm.runtime.evaluation.skip_problem import SkipCase, SkipProblem, even_case, measured_case
from trtllm_replayssm.runtime.evaluation.streams import Stream
from trtllm_replayssm.shapes import SsmShape

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of heads that fade at once, in the made-up cases
OUTPUTS = ("bfloat16", "float32")  # types whose half last place is the threshold for real decays
READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
_SKIPPING = "skipping"  # in the names of the kernels that skip, in no other's
_WARM_UPS = 5  # before each timing: what is made lazily, and the device's clock
_WAIT_CYCLES = 1 << 24  # the device waits until all timed launches are queued, so that none waits for the host
_UNITS = {"byte": 1, "Kbyte": 10**3, "Mbyte": 10**6, "Gbyte": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured: made-up decays on `batch` rows of each layer, and real ones on as many bytes of states as
    the first of them has.

    records: committed records h of the steps; repeats: see `skip_rows`.
    """

    shapes: Mapping[str, SsmShape]
    batch: int
    window: int
    records: Sequence[int]
    repeats: int


def skip_grid(model: Model, streams: Sequence[Stream], prompt: int, tokens: int, grid: Grid) -> list[dict[str, Any]]:
    """Rows of all cases: shares of heads that fade at once, then the decays that the checkpoint has on the streams."""
    device, window, below, rows = model.device, grid.window, THRESHOLDS["bfloat16"], []
    for name, shape in grid.shapes.items():
        made_up = [even_case(grid.batch, shape.heads, window, share, below, device) for share in SHARES]
        found = skip_rows(SkipProblem(shape, grid.batch, window, device), made_up, grid.records, grid.repeats)
        rows += [{**row, "shape": name} for row in found]
    shape = next(iter(grid.shapes.values()))
    name, layer = Path(model.checkpoint.directory).name, model.checkpoint.geometry.ssm
    decays = torch.from_numpy(measure_decays(model, streams, prompt, tokens, lambda done: None))
    many = grid.batch * shape.heads * shape.head_dim // (layer.heads * layer.head_dim)
    real = [
        measured_case(f"as measured, {output} outputs", decays, many, window, THRESHOLDS[output], device)
        for output in OUTPUTS
    ]
    found = skip_rows(SkipProblem(layer, many, window, device), real, grid.records, grid.repeats)
    return [*rows, *({**row, "shape": name} for row in found)]


def skip_rows(
    problem: SkipProblem, cases: Sequence[SkipCase], records: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """A row for each case and number h of committed records: share of faded heads, microseconds of both updates.

    repeats: timed launches of each, in turn; 0: one launch of each and no times. equal_bits: see
    `SkipProblem.equal_bits`; None where a head is so near to the threshold that rounding decides whether it is read.
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
                row["equal_bits"] = problem.equal_bits(case, h) if case.is_clear(h, problem.window) else None
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
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(4)] for _ in range(repeats)]
    for _ in range(_WARM_UPS):
        problem.step(None)
        problem.step(skip_below)
    torch.cuda.synchronize()
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
        median(1e3 * first.elapsed_time(second) for first, second in pairs)
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
