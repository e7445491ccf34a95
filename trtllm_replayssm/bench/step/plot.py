"""The stacked figure of a step benchmark from its JSON lines. matplotlib is the extra `eval`; no GPU is needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_replayssm.bench.step.breakdown import PARTS
from trtllm_replayssm.bench.step.report import Row
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.whole_file import whole_file

_COLOURS = ("tab:red", "tab:pink", "tab:green", "tab:purple", "tab:blue", "tab:grey")


def read_rows(path: Path) -> list[Row]:
    """The JSON lines of a result file. Raises ConfigError for another kind of file; OSError."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        if all(row["what"] in ("products", "step", "ratio") for row in rows):
            return rows
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError("bench plot", str(path), expected="lines of bench step", got=repr(error)) from error
    raise ConfigError("bench plot", str(path), expected="lines of bench step", got="another benchmark's")


def draw_steps(rows: Sequence[Row], path: Path) -> bool:
    """One bar for each profiled step, its parts on top of one another; False, and no file, when none was profiled.

    Raises ConfigError without matplotlib. The same rows give the same file.
    """
    steps = [row for row in rows if row["what"] == "step" and row["breakdown_us"]]
    if not steps:
        return False
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "bench step", "matplotlib", expected="installed", got="none", hint="In a checkout: pip install -e '.[eval]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(max(5.0, 1.5 + 0.75 * len(steps)), 4.6), layout="constrained")
    try:
        _bars(axes, steps)
        with whole_file(path) as file:
            canvas.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=110, metadata={"Software": None})
    finally:
        pyplot.close(canvas)
    return True


def _bars(axes: Any, steps: list[Row]) -> None:
    places = range(len(steps))
    base = [0.0] * len(steps)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        heights = [row["breakdown_us"].get(part, 0.0) / 1e3 for row in steps]
        axes.bar(places, heights, bottom=base, color=colour, label=part, width=0.7)
        base = [b + h for b, h in zip(base, heights, strict=True)]
    axes.plot(places, [row["floor_us"] / 1e3 for row in steps], "k_", markersize=22, label="byte floor")
    axes.plot(places, [row["us"] / 1e3 for row in steps], "k.", markersize=5, label="step, timed")
    axes.set_xticks(places, [f"{r['cache']}\nB={r['B']}\nT={r['T']}" for r in steps], fontsize=7)
    axes.set_ylabel("milliseconds a step")
    first = steps[0]
    names = list(dict.fromkeys(f"{row['model']} layers {row['layers']}" for row in steps))
    axes.set_title(f"{', '.join(names)}, L = {first['L']}, {first['gpu']}", fontsize=9)
    axes.legend(fontsize=7)
    axes.grid(axis="y", alpha=0.3, linewidth=0.4)
