"""`trtllm-replayssm quantize`: write an NVFP4 checkpoint from an unquantised one."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


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


class _StoppedError(BaseException):
    """A signal asked the command to stop; not an `Exception`, so that only clean-up runs on its way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(arguments: argparse.Namespace) -> int:
    """Quantise and report; 128 + number after SIGTERM or SIGHUP, nothing left behind."""
    try:
        return _run(arguments)
    except _StoppedError as stopped:
        sys.stderr.write(f"trtllm-replayssm: stopped by {signal.Signals(stopped.number).name}\n")
        return 128 + stopped.number


def _run(arguments: argparse.Namespace) -> int:
    from trtllm_replayssm.builders.quantize import quantize

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with _orderly_stop() as check_stopped, Progress(*columns, disable=not sys.stderr.isatty(), transient=True) as bar:
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


@contextmanager
def _orderly_stop() -> Iterator[Callable[[], None]]:
    """SIGTERM and SIGHUP raise _StoppedError inside, so that what is half written is removed first.

    The first one raises at once, later ones do not disturb the removal. Python drops an exception that falls into a
    destructor, so that the function yielded raises it again; call it now and then. A SIGHUP that is ignored (nohup)
    stays so.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            raise _StoppedError(received[0])

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            check()

    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield check
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
