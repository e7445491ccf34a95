"""`trtllm-replayssm quantize`: write an NVFP4 checkpoint from an unquantised one."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from trtllm_replayssm.cli.stopping import stopped_by_signals


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "quantize",
        help="write an NVFP4 checkpoint from a BF16 one",
        description="Quantise a checkpoint's weights to NVFP4 (ModelOpt's layout), one tensor at a time.",
    )
    parser.add_argument("source", help="directory of the unquantised checkpoint")
    parser.add_argument("destination", help="new or empty directory; appears complete or not at all")
    parser.add_argument(
        "--recipe", choices=["experts", "dense"], default="dense",
        help="experts: routed experts only, as the public 120B-class checkpoints; dense: every linear layer but "
        "embeddings, output head, routers, convolutions and the MTP head (default)",
    )  # fmt: skip
    parser.add_argument(
        "--fp8", action="append", default=[], metavar="GLOB", help="modules that become FP8 instead; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON report")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Quantise and report."""
    from trtllm_replayssm.builders.quantize import quantize

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with stopped_by_signals(at_once=True) as check_stopped, Progress(
        *columns, disable=not sys.stderr.isatty(), transient=True
    ) as bar:
        task = bar.add_task("quantize", total=None)

        def advance(done: int, total: int, name: str) -> None:
            check_stopped()
            bar.update(task, completed=done, total=total, description=name)

        report = quantize(
            arguments.source, arguments.destination, recipe=arguments.recipe, fp8=arguments.fp8, progress=advance
        )
    formats = Counter(fmt.value for fmt in report.quantised.values())
    if arguments.json:
        result = {
            "destination": arguments.destination,
            "quantised": dict(formats),
            "left": report.left,
            "source_bytes": report.source_bytes,
            "written_bytes": report.written_bytes,
            "files": list(report.files),
            "copied": list(report.copied),
        }
        print(json.dumps(result, indent=2))
        return 0
    print(f"{arguments.destination}: {report.written_bytes:,} bytes from {report.source_bytes:,}")
    for fmt, count in sorted(formats.items()):
        print(f"  {count:6} matrices in {fmt}")
    for module, reason in report.left.items():
        print(f"  left as it was: {module}: {reason}")
    return 0
