"""`trtllm-replayssm eval drift | windows | plot | table`: from result files and the traffic model, no checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trtllm_replayssm.cli.values import integers
from trtllm_replayssm.errors import ConfigError


def add_file_commands(kinds: Any) -> None:
    """Register the commands."""
    drift = kinds.add_parser("drift", help="state error of each head against the theory, from results of kl and decays")
    drift.add_argument("kl", type=Path, help="result of eval kl")
    drift.add_argument("decays", type=Path, help="result of eval decays of the same checkpoint")
    drift.add_argument("--json", type=Path, required=True, metavar="FILE")
    drift.set_defaults(run=run_drift)
    windows = kinds.add_parser(
        "windows", help="what a window per row, and skipping faded checkpoints, would save by the traffic model"
    )
    windows.add_argument("--shapes", help="layer shapes of the kernel benchmark, comma separated (default: all)")
    windows.add_argument("--tokens", default="4,8", help="tokens of a step, comma separated (default 4,8)")
    windows.add_argument("--json", type=Path, required=True, metavar="FILE")
    windows.set_defaults(run=run_windows)
    plot = kinds.add_parser("plot", help="draw result files as PNG; needs no GPU and no checkpoint")
    plot.add_argument("results", type=Path, nargs="+", help="result files of any kind")
    plot.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the figures")
    plot.set_defaults(run=run_plot)
    table = kinds.add_parser("table", help="print result files as Markdown tables")
    table.add_argument("results", type=Path, nargs="+", help="result files of any kind")
    table.set_defaults(run=run_table)


def run_drift(arguments: argparse.Namespace) -> int:
    """Compare state errors with the theory."""
    from trtllm_replayssm.runtime.evaluation.drift import compare
    from trtllm_replayssm.runtime.evaluation.results import read_results, write_results

    kl, decays = read_results(arguments.kl, "kl"), read_results(arguments.decays, "decays")
    if kl["meta"]["checkpoint"] != decays["meta"]["checkpoint"]:
        raise ConfigError(
            "eval drift", "decays", expected=f"of {kl['meta']['checkpoint']}", got=decays["meta"]["checkpoint"]
        )
    shared = [r for r in kl["rows"] if r["formats"].startswith("shared") and r["formats"] != "shared-fp32"]
    floors = {r["length"]: r["state_error"] for r in kl["rows"] if r["formats"] == "shared-fp32"}
    rows = [compare(row, decays["rows"][0]["mean_log_decay"], floors.get(row["length"])) for row in shared]
    write_results(arguments.json, "drift", kl["meta"], rows)
    for row in rows:
        first = "too few heads" if row["typical_ratio"] is None else f"{row['typical_ratio']:.2f}x"
        print(
            f"{row['configuration']:28} N={row['length']:<6} typically within {first} of theory in the first layer, "
            f"{row['typical_ratio_all']:.2f}x in all"
        )
    return 0


def run_windows(arguments: argparse.Namespace) -> int:
    """Simulate windows by the traffic model."""
    from trtllm_replayssm.bench.cases import kernel_shapes
    from trtllm_replayssm.runtime.evaluation.results import write_results
    from trtllm_replayssm.runtime.evaluation.windows import adaptive_rows, skip_rows

    names = arguments.shapes.split(",") if arguments.shapes else list(kernel_shapes())
    unknown = [name for name in names if name not in kernel_shapes()]
    if unknown:
        raise ConfigError("eval windows", "--shapes", expected=f"of {', '.join(kernel_shapes())}", got=unknown)
    rows: list[dict[str, Any]] = []
    for name in names:
        for tokens in integers("eval windows", "--tokens", arguments.tokens):
            rows += adaptive_rows(name, kernel_shapes()[name], tokens)
        rows += skip_rows(name, kernel_shapes()[name])
    write_results(arguments.json, "windows", {"checkpoint": "layer shapes of public models"}, rows)
    for row in (r for r in rows if "scenario" in r):
        print(
            f"{row['shape']:10} T={row['T']} {row['scenario']:36} best one window {row['best_window']:2}, a window per "
            f"row moves {100 * row['saved_over_best']:.1f} % less"
        )
    return 0


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw figures."""
    from trtllm_replayssm.runtime.evaluation.plots import draw
    from trtllm_replayssm.runtime.evaluation.results import read_results

    for path in arguments.results:
        for figure in draw(read_results(path), arguments.out, path.stem):
            print(figure)
    return 0


def run_table(arguments: argparse.Namespace) -> int:
    """Print tables."""
    from trtllm_replayssm.runtime.evaluation.results import read_results
    from trtllm_replayssm.runtime.evaluation.tables import table

    for path in arguments.results:
        print("\n".join(table(read_results(path))), end="\n\n")
    return 0
