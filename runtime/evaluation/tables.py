"""Markdown tables of result files, as docs/results.md has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Results = dict[str, Any]
RATIOS = (
    ("shared NVFP4: RTN / SR", "shared-nvfp4-rtn", "shared-nvfp4-sr"),
    ("shared FP8: RTN / SR", "shared-fp8-rtn", "shared-fp8-sr"),
    ("shared NVFP4 + SR / NVFP4 reads of float32", "shared-nvfp4-sr", "separate-nvfp4-fp32"),
    ("NVFP4 reads: of FP16 + SR / of float32", "separate-nvfp4-fp16-sr", "separate-nvfp4-fp32"),
    ("NVFP4 reads: of FP8 + SR / of float32", "separate-nvfp4-fp8-sr", "separate-nvfp4-fp32"),
)
GROWTHS = ("shared-nvfp4-sr", "shared-nvfp4-rtn", "shared-fp8-sr", "shared-fp8-rtn", "separate-nvfp4-fp32")


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
    head = [results["meta"]["checkpoint"], *(f"N = {n}" for n in lengths)]
    lines = _markdown(head, body)
    for more in (_ratios(rows, lengths), _by_window(rows)):
        lines += ["", *more] if more else []
    return lines


def _ratios(rows: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[str]:
    """What the paper's claims are about, at L = 16: one configuration over another, and growth with length."""
    kl = {(r["configuration"], r["length"]): r["kl"] for r in rows}

    def ratio(above: Any, below: Any) -> str:
        return f"{above / below:.2f}" if above and below and above > 0 and below > 0 else ""

    body = []
    for name, above, below in RATIOS:
        cells = [ratio(kl.get((f"{above}-L16", n)), kl.get((f"{below}-L16", n))) for n in lengths]
        body += [[name, *cells]] if any(cells) else []
    for formats in GROWTHS:
        first = kl.get((f"{formats}-L16", lengths[0]))
        cells = [ratio(kl.get((f"{formats}-L16", n)), first) for n in lengths]
        body += [[f"{formats}: growth since N = {lengths[0]}", *cells]] if any(cells[1:]) else []
    return _markdown(["ratio of KL", *(f"N = {n}" for n in lengths)], body) if body else []


def _by_window(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Divergence by window, at the longest length at which the most windows were measured."""
    found: dict[int, dict[str, dict[int, float]]] = {}
    for r in (r for r in rows if r["kl"] is not None):
        found.setdefault(r["length"], {}).setdefault(r["formats"], {})[r["window"]] = r["kl"]
    if not found:
        return []
    length = max(found, key=lambda n: (sum(len(w) for w in found[n].values() if len(w) > 1), n))
    several = {formats: kl for formats, kl in found[length].items() if len(kl) > 1}
    windows = sorted({w for kl in several.values() for w in kl})
    body = [[f, *(f"{kl[w]:.1e}" if w in kl else "" for w in windows)] for f, kl in sorted(several.items())]
    return _markdown([f"KL at N = {length}, by L", *map(str, windows)], body) if body else []


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
    """Steps by their decays: DRAM bytes read and microseconds of the update, without and with skipping, and whether
    the bits were those of the update with zero for what was skipped.
    """

    def pair(row: dict[str, Any], what: str, scale: float, digits: int) -> str:
        both = [row[key] for key in (f"plain_{what}", f"skipping_{what}") if key in row]
        return " / ".join(f"{value / scale:.{digits}f}" for value in both)

    body = [
        [
            r["shape"], r["case"], f"{r['h']}{', flush' if r['flushes'] else ''}", f"{100 * r['faded']:.0f} %",
            f"{r['state_bytes'] / 1e6:.0f}", pair(r, "read_bytes", 1e6, 0), pair(r, "us", 1, 0),
            {True: "equal", False: "DIFFER"}.get(r.get("equal_bits"), ""),
        ]
        for r in results["rows"]
    ]  # fmt: skip
    both = "update / skipping"
    head = ["layer", "decays", "h", "faded", "states, MB", f"read, MB: {both}", f"us: {both}", "bits"]
    return _markdown(head, body)
