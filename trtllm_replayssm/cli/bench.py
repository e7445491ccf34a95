"""`trtllm-replayssm bench kernel`: native kernels against byte floor and baseline; the other benchmarks hang here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any

import trtllm_replayssm.cli.bench_step as bench_step
import trtllm_replayssm.cli.bench_throughput as bench_throughput
from trtllm_replayssm.bench.cases import KernelCase, Operation, kernel_cases, kernel_shapes, suites
from trtllm_replayssm.checks import require_positive
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.whole_file import growing_file


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("bench", help="measure kernels and whole steps", description="Measurements.")
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    kernel = kinds.add_parser(
        "kernel", help="one layer's update, by shape, batch, tokens and formats",
        description="Times the kernels of the native library with a cold L2 over full windows, flushes included, after "
        "a correctness gate against float64 in the same process. A case whose gate is red, or for which no kernel is "
        "built, prints no speed.",
    )  # fmt: skip
    kernel.add_argument("--suite", help=f"comma separated; of {', '.join(suites())} (default: all)")
    kernel.add_argument(
        "--operation", help=f"comma separated; of {', '.join(o.value for o in Operation)} (default: all)"
    )
    kernel.add_argument("--shape", help=f"comma separated; of {', '.join(kernel_shapes())} (default: all)")
    kernel.add_argument("--rows", help="batch sizes, comma separated (default: all of the list)")
    kernel.add_argument("--tokens", help="tokens of a step, comma separated (default: all of the list)")
    kernel.add_argument("--rounds", type=int, default=20, help="timed replays of each graph (default 20)")
    kernel.add_argument(
        "--json", type=Path, metavar="FILE",
        help="also write one JSON object a line, into FILE.partial until the command ends well",
    )  # fmt: skip
    kernel.add_argument(
        "--peers", nargs="?", const="also", choices=("also", "only"),
        help="also time the kernels of installed peers (vllm, flashinfer); only: not ours",
    )  # fmt: skip
    kernel.add_argument(
        "--schemes", action="store_true", help="also time our versions of earlier recovery schemes (paper, Appendix A)"
    )
    kernel.add_argument("--list", action="store_true", help="print the cases and their byte floors; needs no GPU")
    kernel.set_defaults(run=run)
    bench_step.add_command(kinds)
    bench_throughput.add_command(kinds)


def run(arguments: argparse.Namespace) -> int:
    """List or measure; 1 when a gate was red."""
    require_positive("bench kernel", "--rounds", arguments.rounds)
    cases = select(arguments)
    if arguments.list:
        for case in cases:
            floors = {h: case.floor_bytes(h) for h in sorted({*case.cycle(1), *case.cycle(case.tokens)})}
            print(json.dumps({"case": case.name, "floor_bytes": floors}))
        return 0
    if arguments.json is None:
        return _measure(cases, arguments, None)
    with growing_file(arguments.json) as lines:
        return _measure(cases, arguments, lines)


def select(arguments: argparse.Namespace) -> list[KernelCase]:
    """The cases that the options name, a shape's conventional ones first. Raises ConfigError when there is none."""
    wanted: list[tuple[str, Callable[[KernelCase], str], str | None]] = [
        ("suite", lambda c: c.suite, arguments.suite),
        ("operation", lambda c: c.operation.value, arguments.operation),
        ("shape", lambda c: c.shape_name, arguments.shape),
        ("rows", lambda c: str(c.rows), arguments.rows), ("tokens", lambda c: str(c.tokens), arguments.tokens),
    ]  # fmt: skip
    cases = list(kernel_cases())
    for option, value_of, given in wanted:
        if given is None:
            continue
        known = list(dict.fromkeys(value_of(case) for case in kernel_cases()))
        names = given.split(",")
        for name in names:
            if name not in known:
                raise ConfigError("bench kernel", f"--{option}", expected=f"of {', '.join(known)}", got=repr(name))
        cases = [case for case in cases if value_of(case) in names]
    if not cases:
        raise ConfigError("bench kernel", "options", expected="at least one case", got="none that fits all of them")
    order = list(kernel_shapes())
    return sorted(cases, key=lambda c: (order.index(c.shape_name), c.operation is not Operation.CONVENTIONAL))


def _measure(cases: list[KernelCase], arguments: argparse.Namespace, lines: IO[str] | None) -> int:
    from trtllm_replayssm.bench.machine import describe
    from trtllm_replayssm.bench.peers import run_peers
    from trtllm_replayssm.bench.run import entry, run_cases
    from trtllm_replayssm.bench.schemes import run_schemes
    from trtllm_replayssm.bench.timing import copy_bandwidth
    from trtllm_replayssm.ops.native_library import installed_library

    machine, library, bandwidth = describe(), installed_library(), copy_bandwidth()

    def write(row: dict[str, Any]) -> None:
        if lines is not None:
            lines.write(json.dumps({**row, "copy_TBs": round(bandwidth * 1e-12, 3), **machine}) + "\n")
            lines.flush()

    print(
        ", ".join(f"{name} {value}" for name, value in machine.items()), f"copy {bandwidth * 1e-12:.3f} TB/s", sep=", "
    )
    others: list[Iterator[dict[str, Any]]] = []
    if arguments.schemes:
        others.append(run_schemes(cases, library, bandwidth, rounds=arguments.rounds))
    if arguments.peers is not None:
        others.append(run_peers(cases, bandwidth, rounds=arguments.rounds))
    own = () if arguments.peers == "only" else cases
    ours = (entry(row) for row in run_cases(own, library, bandwidth, rounds=arguments.rounds))
    red = False
    for fields in chain(ours, *others):
        write(fields)
        print(_line(fields), flush=True)
        red |= fields.get("green") is False
    return 1 if red else 0


def _line(row: dict[str, Any]) -> str:
    if row["what"] == "gate":
        colour = "green" if row["green"] else "RED"
        return f"gate {row['case']}: output {row['output_error']:.2e}, state {row['state_error']:.2e}: {colour}"
    if "reason" in row:
        return f"{row.get('case') or row.get('peer') or row['what']}: {row['reason']}"
    name = f"{row['shape']} {row.get('peer', 'ours')} {row['what']}"
    formats = row["recurrence"] + (f"/{row['read']}" if row["read"] else "")
    ratio = "".join(
        f"  {row[f'over_{other}']:.3f} of {other}" for other in ("conventional", "snapshots") if f"over_{other}" in row
    )
    if "staggered_us" in row:
        ratio += f", staggered {row['staggered_us']:.2f} us"
    low, high = row["us_quartiles"]
    kept = f" a={row['accepted']}" if row["T"] > 1 else ""
    launch = " settled" if row["settled"] else " programmatic" if row["programmatic"] else ""
    return (
        f"{name:32} B={row['B']} T={row['T']}{kept} L={row['L']} {formats}{launch}: {row['us']:.2f} us "
        f"({low:.2f}-{high:.2f}), {row['GBs']:.0f} GB/s, {row['percent_of_floor']:.1f} % of the floor{ratio}"
    )
