"""Markdown tables of result files, as docs/results.md has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Results = dict[str, Any]


def table(results: Results) -> list[str]:
    """Lines of the table of one result file."""
    kinds = {"kl": _kl, "drift": _drift, "decays": _decays, "tasks": _tasks, "windows": _windows, "skip": _skip}
    return kinds[results["what"]](results)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def _kl(results: Results) -> list[str]:
    """Divergence by configuration and length; what was not measured stays empty."""
    rows = results["rows"]
    lengths = sorted({r["length"] for r in rows})
    found = {(r["configuration"], r["length"]): "diverged" if r["kl"] is None else f"{r['kl']:.1e}" for r in rows}
    names = sorted({r["configuration"] for r in rows}, key=lambda n: (n.split("-L")[0], int(n.split("-L")[1])))
    body = [[name, *(found.get((name, n), "") for n in lengths)] for name in names]
    return _markdown([results["meta"]["checkpoint"], *(f"N = {n}" for n in lengths)], body)


def _drift(results: Results) -> list[str]:
    longest: dict[str, dict[str, Any]] = {}
    for row in results["rows"]:
        if row["length"] >= longest.get(row["configuration"], row)["length"]:
            longest[row["configuration"]] = row
    keys = ("rank_correlation", "typical_ratio", "rank_correlation_all", "typical_ratio_all")
    body = [
        [r["configuration"], str(r["length"]), *("-" if r[key] is None else f"{r[key]:.2f}" for key in keys)]
        for r in sorted(longest.values(), key=lambda r: str(r["configuration"]))
    ]  # fmt: skip
    head = ["N", "rank correlation", "typical ratio", "rank correlation, all layers", "typical ratio, all layers"]
    return _markdown([results["meta"]["checkpoint"], *head], body)


def _decays(results: Results) -> list[str]:
    saved = results["rows"][0]["saved"]
    windows = sorted({s["window"] for s in saved})
    cell = {(s["output"], s["window"]): f"{100 * s['saved']:.1f} %" for s in saved}
    outputs = list(dict.fromkeys(s["output"] for s in saved))
    body = [[output, *(cell[output, w] for w in windows)] for output in outputs]
    return _markdown([results["meta"]["checkpoint"], *(f"L = {w}" for w in windows)], body)


def _tasks(results: Results) -> list[str]:
    """Accuracy of each configuration; in brackets tokens won and lost against float32."""
    rows = results["rows"]
    cells = list(dict.fromkeys((r["task"], r["length"]) for r in rows))
    found = {
        (r["configuration"], r["task"], r["length"]): f"{100 * r['accuracy']:.1f} (+{r['won']} -{r['lost']})"
        for r in rows
    }
    names = list(dict.fromkeys(r["configuration"] for r in rows))
    body = [[name, *(found[name, cell[0], cell[1]] for cell in cells)] for name in names]
    return _markdown([results["meta"]["checkpoint"], *(f"{t}, N = {n}" for t, n in cells)], body)


def _windows(results: Results) -> list[str]:
    rows = [r for r in results["rows"] if "scenario" in r]
    body = [
        [
            r["shape"], str(r["T"]), r["scenario"], f"{r['mean_accepted']:.2f}", f"{r['bytes_at_16'] / 1e3:.0f}",
            f"{r['best_window']}: {r['bytes_at_best'] / 1e3:.0f}", f"{r['bytes_adaptive'] / 1e3:.0f}",
            f"{100 * r['saved_over_best']:.1f} %",
        ]
        for r in rows
    ]  # fmt: skip
    head = ["shape", "T", "acceptance", "mean", "L = 16, kB a token", "best L", "per row", "saved"]
    return _markdown(head, body)


def _skip(results: Results) -> list[str]:
    """Steps by their decays: DRAM bytes read and microseconds of the update, without and with skipping."""

    def pair(row: dict[str, Any], what: str, scale: float, digits: int) -> str:
        both = [row[key] for key in (f"plain_{what}", f"skipping_{what}") if key in row]
        return " / ".join(f"{value / scale:.{digits}f}" for value in both)

    body = [
        [
            r["shape"], r["case"], f"{r['h']}{', flush' if r['flushes'] else ''}", f"{100 * r['faded']:.0f} %",
            f"{r['state_bytes'] / 1e6:.0f}", pair(r, "read_bytes", 1e6, 0), pair(r, "us", 1, 0),
        ]
        for r in results["rows"]
    ]  # fmt: skip
    head = ["layer", "decays", "h", "faded", "states, MB", "read, MB: update / skipping", "us: update / skipping"]
    return _markdown(head, body)
