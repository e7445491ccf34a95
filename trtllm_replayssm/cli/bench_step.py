"""`trtllm-replayssm bench step`: whole decode and verify steps of a model, replay beside conventional."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import IO, Any

from trtllm_replayssm.cli.options import ACTIVATIONS, add_replay_options, replay_config
from trtllm_replayssm.cli.values import integers, layer_range
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.weights.presets import preset_names
from trtllm_replayssm.whole_file import growing_file

_DESCRIPTION = """Times whole decode steps (T = 1) and verify steps by replay of one CUDA graph each: forward pass,
argmax, acceptance forced to a mean, commit and the next step's inputs, flushes of full windows included, rows at all
places of their windows. A preset has random parameters in the public checkpoint's formats; keys, values and states are
random as well, and no drafting head runs. Layers of a preset are measured with a vocabulary of 4,096 ids. Both caches
run one after another in one process."""


def add_command(kinds: Any) -> None:
    """Register the command."""
    step = kinds.add_parser(
        "step", help="whole decode and verify steps of a model", description=_DESCRIPTION,
        epilog=f"Presets: {', '.join(preset_names())}",
    )  # fmt: skip
    step.add_argument("model", help="a preset, or a checkpoint directory")
    step.add_argument("--batch", default="1,32,256", help="rows of a step, comma separated (default 1,32,256)")
    step.add_argument("--verify-batch", help="rows of a step of several tokens (default: as --batch)")
    step.add_argument("--tokens", default="1,4", help="tokens of a step, comma separated (default 1,4)")
    step.add_argument("--state-cache", default="conventional,replay", help="which, comma separated (default both)")
    step.add_argument("--context", type=int, default=512, help="committed tokens of every sequence (default 512)")
    step.add_argument(
        "--forced-acceptance", type=float, default=3.4, metavar="MEAN",
        help="tokens that a step of several commits on average (default 3.4, at most its tokens)",
    )  # fmt: skip
    step.add_argument("--layers", metavar="A-B", help="of a preset: only these layers, both ends kept")
    step.add_argument(
        "--largest", action="store_true",
        help="also the largest batch that the memory holds, for each cache and the most tokens",
    )
    step.add_argument("--rounds", type=int, default=5, help="timed blocks of as many steps as a window (default 5)")
    step.add_argument(
        "--breakdown", default="256", metavar="ROWS", help="profile these batches by kernel, comma separated, or none"
    )
    step.add_argument("--activation", choices=ACTIVATIONS, default="bfloat16")
    step.add_argument("--device", default="cuda")
    step.add_argument(
        "--json", type=Path, metavar="FILE",
        help="also write one JSON object a line, into FILE.partial until the command ends well",
    )  # fmt: skip
    step.add_argument("--png", type=Path, metavar="FILE", help="draw the breakdown")
    add_replay_options(step)
    step.set_defaults(run=run)
    plot = kinds.add_parser("plot", help="the figure and the lines of a result file of `bench step`, again")
    plot.add_argument("results", type=Path, nargs="+", help="files of --json")
    plot.add_argument("--png", type=Path, metavar="FILE", help="draw the breakdown")
    plot.set_defaults(run=run_plot)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    if arguments.json is None:
        rows = _measure(arguments, None)
    else:
        with growing_file(arguments.json) as lines:
            rows = _measure(arguments, lines)
    _draw(rows, arguments.png)
    return 0


def run_plot(arguments: argparse.Namespace) -> int:
    """Print and draw what files hold."""
    from trtllm_replayssm.bench.step.plot import read_rows
    from trtllm_replayssm.bench.step.report import line

    rows = [row for path in arguments.results for row in read_rows(path)]
    print("\n".join(line(row) for row in rows))
    _draw(rows, arguments.png)
    return 0


def _draw(rows: list[dict[str, Any]], path: Path | None) -> None:
    if path is None:
        return
    from trtllm_replayssm.bench.step.plot import draw_steps

    if not draw_steps(rows, path):
        print("no step was profiled: nothing to draw")


def _measure(arguments: argparse.Namespace, lines: IO[str] | None) -> list[dict[str, Any]]:
    from trtllm_replayssm.bench.machine import describe
    from trtllm_replayssm.bench.step.cases import Schedule
    from trtllm_replayssm.bench.step.model import step_model
    from trtllm_replayssm.bench.step.products import Ceilings
    from trtllm_replayssm.bench.step.report import line, ratios
    from trtllm_replayssm.bench.step.run import product_fields, run_cases, with_shapes
    from trtllm_replayssm.bench.timing import copy_bandwidth, product_rate
    from trtllm_replayssm.runtime.session.device import usable_device

    device = usable_device(arguments.device)
    machine = describe(device)
    ceilings = Ceilings(copy_bandwidth(device), product_rate(device))
    layers = layer_range("bench step", arguments.layers)
    model = step_model(arguments.model, layers, ActivationDtype(arguments.activation), device)
    schedule = Schedule(warm_up=arguments.window, block=arguments.window, rounds=arguments.rounds)
    named = arguments.breakdown
    profiled = set() if named == "none" else set(integers("bench step", "--breakdown", named))
    measured = {
        "copy_TBs": round(ceilings.bandwidth * 1e-12, 3), "product_TFLOPs": round(ceilings.products * 1e-12, 1)
    }  # fmt: skip
    rows: list[dict[str, Any]] = []

    def write(fields: dict[str, Any]) -> None:
        rows.append({**fields, **measured, **machine})
        print(line(fields), flush=True)
        if lines is not None:
            lines.write(json.dumps(rows[-1]) + "\n")
            lines.flush()

    print(", ".join(f"{name} {value}" for name, value in {**machine, **measured}.items()))
    cases = _cases(arguments, model, schedule)
    ceilings = with_shapes(model, cases, ceilings)
    write(product_fields(model, cases, ceilings))
    for result in run_cases(model, cases, schedule, ceilings, profiled=lambda case: case.rows in profiled):
        write(result.fields())
    for fields in list(ratios(rows)):
        write(fields)
    return rows


def _cases(arguments: argparse.Namespace, model: Any, schedule: Any) -> list[Any]:
    """The cases that fit into the device's memory, those that share a pool together; says which do not."""
    from trtllm_replayssm.bench.step.cases import LARGEST, StepCase
    from trtllm_replayssm.bench.step.largest import largest_rows, rows_that_fit

    cases, largest = [], []
    tokens = integers("bench step", "--tokens", arguments.tokens)
    for count in tokens:
        several = count > 1 and arguments.verify_batch is not None
        flag, text = ("--verify-batch", arguments.verify_batch) if several else ("--batch", arguments.batch)
        batches = integers("bench step", flag, text)
        accepted = 1.0 if count == 1 else min(arguments.forced_acceptance, float(count))
        for cache in arguments.state_cache.split(","):
            shared = {
                "cache": cache, "tokens": count, "accepted": accepted, "context": arguments.context,
                "replay": replay_config(arguments, count),
            }  # fmt: skip
            most = rows_that_fit(model, StepCase(rows=1, **shared), schedule)
            for rows in batches:
                if most is None or rows <= most:
                    cases.append(StepCase(rows=rows, **shared))
                else:
                    print(f"{cache} B={rows} T={count}: left out, the memory holds {most} rows")
            if arguments.largest and count == max(tokens):
                rows = largest_rows(model, StepCase(rows=1, role=LARGEST, **shared), schedule)
                largest.append(StepCase(rows=rows, role=LARGEST, **shared))
    return cases + largest

