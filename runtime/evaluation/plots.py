"""Figures from result files. matplotlib is the extra `eval`; nothing here needs a checkpoint, torch or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.whole_file import whole_file

Results = dict[str, Any]
_SIZE = (7.0, 4.4)
_STYLES = {"fp32": ":", "fp16": "-.", "fp8": "--", "nvfp4": "-"}
_MARKERS = {"sr": "o", "rtn": "x", "": "s"}


def draw(results: Results, folder: Path, stem: str) -> list[Path]:
    """Write the figures of one result file -> their paths. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "eval plot", "matplotlib", expected="installed", got="none",
            hint="In a checkout: pip install -e '.[eval]'",
        ) from error  # fmt: skip
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, list[tuple[str, Callable[[Results, Any], bool]]]] = {
        "kl": [("kl", _kl_by_length), ("kl_by_window", _kl_by_window), ("state_error", _state_error)],
        "drift": [("", _drift)], "decays": [("", _decays)], "tasks": [("", _tasks)],
        "windows": [("adaptive", _adaptive), ("skip", _skip)], "skip": [("", _measured_skip)],
    }  # fmt: skip
    paths = []
    for name, figure in kinds.get(results["what"], []):
        path = _one(results, folder / (f"{stem}_{name}.png" if name else f"{stem}.png"), figure)
        paths += [path] if path else []
    return paths


def _one(results: Results, path: Path, figure: Callable[[Results, Any], bool]) -> Path | None:
    """A file with one pair of axes, or None where the results have nothing to show in it."""
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    try:
        if not figure(results, axes):
            return None
        axes.grid(alpha=0.3, which="both", linewidth=0.4)
        # no date and version inside, so that the same data gives the same file
        with whole_file(path) as file:
            canvas.savefig(file, format="png", dpi=110, metadata={"Software": None})
        return path
    finally:
        pyplot.close(canvas)


def _style(formats: str) -> dict[str, Any]:
    """Colour: shared or separate; line: the format that serves reads; marker: the rounding of the recurrence."""
    parts = formats.split("-")
    rounding = parts[-1] if parts[-1] in _MARKERS else ""
    colour = {"shared": "tab:red", "separate": "tab:blue"}[parts[0]]
    return {
        "color": "grey" if formats == "shared-fp32" else colour, "linestyle": _STYLES[parts[1]],
        "marker": _MARKERS[rounding], "markersize": 4, "linewidth": 1.2,
    }  # fmt: skip


def _curve(rows: list[dict[str, Any]], x: str, y: str) -> tuple[list[float], list[float]]:
    points = sorted((r[x], r[y]) for r in rows if r[y] is not None and r[y] > 0)
    return [p[0] for p in points], [p[1] for p in points]


def _title(results: Results, what: str) -> str:
    meta = results["meta"]
    return f"{what}: {meta['checkpoint']}, {len(meta['rows'])} rows, {meta['device_name']}"


def _by_length(results: Results, axes: Any, y: str) -> bool:
    rows = [r for r in results["rows"] if r["window"] == 16]
    for name in dict.fromkeys(r["configuration"] for r in rows):
        mine = [r for r in rows if r["configuration"] == name]
        axes.plot(*_curve(mine, "length", y), label=name, **_style(mine[0]["formats"]))
    axes.set(xscale="log", yscale="log", xlabel="decoded tokens N")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=6, ncols=2)
    return bool(rows)


def _kl_by_length(results: Results, axes: Any) -> bool:
    axes.set_title(_title(results, "Output KL by length, L = 16"), fontsize=9)
    axes.set_ylabel("KL(float32 || configuration), nats, last 256 positions")
    return _by_length(results, axes, "kl")


def _state_error(results: Results, axes: Any) -> bool:
    axes.set_title(_title(results, "State error of the worst head by length, L = 16"), fontsize=9)
    axes.set_ylabel("relative Frobenius error")
    return _by_length(results, axes, "state_error_worst_head")


def _kl_by_window(results: Results, axes: Any) -> bool:
    """At the longest length that most windows were measured at."""
    formats = [f for f in dict.fromkeys(r["formats"] for r in results["rows"]) if f != "shared-fp32"]
    shown = False
    for name in formats:
        rows = [r for r in results["rows"] if r["formats"] == name]
        windows = {r["window"] for r in rows}
        if len(windows) < 3:
            continue
        common = set.intersection(*({r["length"] for r in rows if r["window"] == w} for w in windows))
        length = max(common)
        x, y = _curve([r for r in rows if r["length"] == length], "window", "kl")
        axes.plot(x, y, label=f"{name}, N = {length}", **_style(name))
        shown = True
    axes.set(yscale="log", xlabel="window L", ylabel="KL, nats")
    axes.set_xscale("log", base=2)
    axes.set_title(_title(results, "Output KL by window"), fontsize=9)
    if shown:
        axes.legend(fontsize=7)
    return shown


def _drift(results: Results, axes: Any) -> bool:
    """Each configuration at its longest length: the theory's curve, the first layer's heads on it, and the others."""
    longest: dict[str, dict[str, Any]] = {}
    for row in results["rows"]:
        if row["length"] >= longest.get(row["configuration"], row)["length"]:
            longest[row["configuration"]] = row
    chosen = [r for r in longest.values() if "-L16" in r["configuration"]]
    for i, row in enumerate(chosen):
        forget = -np.array(row["log_decay"])
        order = np.argsort(forget)
        label = f"{row['configuration']}, N = {row['length']}"
        first, measured = row["first_layer"], row["measured"]
        axes.plot(forget[:first], measured[:first], "o", color=f"C{i}", markersize=5)
        axes.plot(forget[first:], measured[first:], "x", color=f"C{i}", markersize=3, alpha=0.5)
        axes.plot(forget[order], np.array(row["theory"])[order], "-", color=f"C{i}", linewidth=1, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="mean forgetting of a head per token, -log alpha",
        ylabel="relative state error", ylim=(3e-8, 3e1),
    )  # fmt: skip
    title = "Theory (lines), first layer's heads (dots), others (crosses)"
    axes.set_title(_title(results, title), fontsize=8)
    axes.legend(fontsize=7)
    return bool(chosen)


def _decays(results: Results, axes: Any) -> bool:
    row = results["rows"][0]
    for i, (name, shares) in enumerate(row["live_share"].items()):
        axes.plot(range(len(shares)), shares, color=f"C{i}", label=f"below what {name} resolves")
    axes.set(xlabel="tokens since the checkpoint", ylabel="share of heads that still need it", ylim=(0, 1.02))
    axes.set_title(_title(results, "Heads that have not forgotten their checkpoint"), fontsize=9)
    axes.legend(fontsize=7)
    return True


def _tasks(results: Results, axes: Any) -> bool:
    rows = results["rows"]
    names = list(dict.fromkeys(r["configuration"] for r in rows))
    cells = list(dict.fromkeys((r["task"], r["length"]) for r in rows))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        change = [
            100 * (r["accuracy"] - r["fp32"]) for c in cells for r in rows
            if (r["task"], r["length"]) == c and r["configuration"] == name
        ]  # fmt: skip
        axes.bar(np.arange(len(cells)) + i * width, change, width, label=name)
    axes.set_xticks(np.arange(len(cells)) + 0.4, [f"{t}\nN={n}" for t, n in cells], fontsize=7)
    axes.set_ylabel("accuracy against float32, percentage points")
    axes.set_title(_title(results, "Generated tasks"), fontsize=9)
    axes.legend(fontsize=6)
    return bool(rows)


def _adaptive(results: Results, axes: Any) -> bool:
    rows = [r for r in results["rows"] if "scenario" in r]
    scenarios = list(dict.fromkeys(r["scenario"] for r in rows))
    cells = list(dict.fromkeys((r["shape"], r["T"]) for r in rows))
    for i, scenario in enumerate(scenarios):
        mine = {(r["shape"], r["T"]): 100 * r["saved_over_best"] for r in rows if r["scenario"] == scenario}
        saved = [mine[cell] for cell in cells]
        axes.bar(np.arange(len(cells)) + 0.25 * i, saved, 0.25, label=scenario)
    axes.set_xticks(np.arange(len(cells)) + 0.25, [f"{shape}\nT={tokens}" for shape, tokens in cells], fontsize=7)
    axes.set_ylabel("% of state and record bytes saved")
    axes.set_title("A window per row against the best one window, by the traffic model", fontsize=9)
    axes.legend(fontsize=7)
    return bool(rows)


def _skip(results: Results, axes: Any) -> bool:
    rows = [r for r in results["rows"] if "alpha" in r]
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    outputs = list(dict.fromkeys(r["output"] for r in rows))
    for row in rows:
        axes.plot(
            row["alpha"], 100 * np.array(row["saved"]), color=f"C{shapes.index(row['shape'])}",
            linestyle=("-", "--", ":")[outputs.index(row["output"])], linewidth=1.2,
            label=f"{row['shape']}, {row['output']} outputs",
        )  # fmt: skip
    axes.set(xlabel="decay of a head per token, constant", ylabel="% of the head's bytes saved")
    axes.set_title("Skipping checkpoint reads by decay, plain decoding, L = 16, float32 state", fontsize=9)
    axes.legend(fontsize=6, ncols=2)
    return bool(rows)


def _measured_skip(results: Results, axes: Any) -> bool:
    """Bytes read and time of the skipping update as shares of the update's, by the share of heads that have faded."""
    for what, colour, label in (("read_bytes", "tab:blue", "bytes read"), ("us", "tab:red", "time")):
        for flushes, marker in ((False, "o"), (True, "s")):
            points = [
                (r["faded"], r[f"skipping_{what}"] / r[f"plain_{what}"])
                for r in results["rows"]
                if r["flushes"] is flushes and f"plain_{what}" in r
            ]
            if points:
                axes.scatter(
                    *zip(*points, strict=True), marker=marker, s=18, color=colour,
                    label=f"{label}{', steps that flush' if flushes else ''}",
                )  # fmt: skip
    axes.plot([0, 1], [1, 0], color="grey", linestyle=":", linewidth=1, label="live share: states alone")
    axes.set(xlabel="share of heads that have faded", ylabel="skipping update / update", ylim=(0, 1.15))
    axes.set_title(f"Skipping faded checkpoints, {results['meta']['device_name']}")
    axes.legend(fontsize=8, loc="lower left")
    return True
