"""`trtllm-replayssm build`: TensorRT engines of a checkpoint, or of a public geometry with random weights."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trtllm_replayssm.checks import shown
from trtllm_replayssm.cli.options import ACTIVATIONS, add_replay_options, replay_config
from trtllm_replayssm.cli.stopping import stopped_by_signals
from trtllm_replayssm.cli.values import layer_range
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.weights.presets import preset_names

if TYPE_CHECKING:  # imported when the command runs
    from trtllm_replayssm.builders.build import BuildReport
    from trtllm_replayssm.builders.options import BuildOptions
    from trtllm_replayssm.builders.sources import Source

MIB = 1 << 20


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "build",
        help="compile a checkpoint into TensorRT engines",
        description="Compile a checkpoint into a bundle of TensorRT engines. With tensorrt_rtx no GPU is needed.",
        epilog=f"Presets: {', '.join(preset_names())}",
    )
    parser.add_argument("checkpoint", nargs="?", help="a checkpoint directory (or give --preset)")
    parser.add_argument(
        "--output", "--output-dir", "-o", required=True, metavar="DIR",
        help="new or empty directory; appears complete or not at all",
    )  # fmt: skip
    parser.add_argument("--preset", metavar="NAME", help="a public geometry instead of a checkpoint")
    parser.add_argument("--random-weights", action="store_true", help="needed with --preset, which brings no weights")
    parser.add_argument("--layers", metavar="A-B", help="with --preset: only these layers, both ends kept")
    parser.add_argument("--no-mtp", action="store_true", help="leave the drafting head out")
    parser.add_argument("--engines-only", action="store_true", help="leave out the weights beside the engines")
    target = parser.add_argument_group("target")
    target.add_argument("--flavour", choices=["tensorrt", "tensorrt_rtx"], default="tensorrt_rtx")
    target.add_argument(
        "--target", default="current", metavar="CC", help='compute capability such as "12.0", or the GPU present'
    )
    target.add_argument("--plugin-library", metavar="PATH", help="libtrtllm_replayssm_plugins.so (flavour tensorrt)")
    target.add_argument("--weights", choices=["checkpoint", "bf16"], default="checkpoint",
                        help="as stored, or dequantised for GPUs without FP4 or FP8")  # fmt: skip
    target.add_argument("--quantize", choices=["dense-nvfp4"], help="quantise dense linear layers as they are built")
    target.add_argument("--activation", choices=ACTIVATIONS, default="bfloat16")
    target.add_argument("--tp-size", type=int, default=1, help="GPUs that share the model (default 1)")
    target.add_argument("--tp-rank", default="all", metavar="R|all", help="the one to build engines for (default all)")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-batch-size", dest="max_batch", type=int, default=8, help="rows of a step and slots (default 8)"
    )
    limits.add_argument("--max-seq-len", type=int, default=8192, help="positions of a slot (default 8192)")
    limits.add_argument("--max-draft-len", type=int, default=0, help="drafted tokens of a verify step (default 0)")
    limits.add_argument("--context-tokens", type=int, default=2048, help="largest prompt chunk (default 2048)")
    add_replay_options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON report")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Build and report."""
    options = _options(arguments)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    began = time.monotonic()
    with stopped_by_signals(at_once=False) as check_stopped, _source(arguments, options) as source, Progress(
        *columns, disable=not sys.stderr.isatty(), transient=True
    ) as bar:
        task = bar.add_task("build", total=None)

        def advance(what: str, done: int) -> None:
            check_stopped()
            bar.update(task, description=f"{done} engines done; {what}")

        reports = _build(arguments, options, source, advance)
    _print(arguments, reports, time.monotonic() - began)
    return 0


def _build(
    arguments: argparse.Namespace, options: BuildOptions, source: Source, progress: Callable[[str, int], None]
) -> tuple[BuildReport, ...]:
    """One rank's engines, or those of every rank asked for."""
    from trtllm_replayssm.builders.build import build
    from trtllm_replayssm.builders.build_ranks import build_ranks

    settings: dict[str, Any] = {
        "tokenizer": source.tokenizer, "with_weights": not arguments.engines_only,
        "plugin_library": arguments.plugin_library, "progress": progress,
    }  # fmt: skip
    if options.tp_size == 1:
        return (build(source.parameters, source.config, arguments.output, options, **settings),)
    ranks = range(options.tp_size) if arguments.tp_rank == "all" else (options.tp_rank,)
    return build_ranks(source.parameters, source.config, arguments.output, options, ranks=ranks, **settings)


def _print(arguments: argparse.Namespace, reports: tuple[BuildReport, ...], seconds: float) -> None:
    records = [record for report in reports for record in report.records]
    info, size = reports[-1].manifest.build, sum(record.bytes for record in records)
    largest = max(report.largest_engine_bytes for report in reports)
    result = {
        "bundle": arguments.output, "engines": len(records), "engine_bytes": size,
        "largest_engine_bytes": largest, "peak_rss_bytes": info.peak_rss_bytes,
        "seconds": round(seconds, 1), "flavour": info.flavour, "target": info.target,
        "tp_size": info.tp_size, "tp_ranks": [report.manifest.build.tp_rank for report in reports],
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    shared = "" if info.tp_size == 1 else f" of {len(reports)} of {info.tp_size} ranks"
    print(
        f"{arguments.output}: {len(records)} engines{shared} for {info.flavour} {info.tensorrt_version}, "
        f"{info.target}: {size / MIB:.1f} MiB, the largest {largest / MIB:.1f} MiB"
    )
    print(f"  {result['seconds']} s, peak memory of the process {info.peak_rss_bytes / MIB:.0f} MiB")


def _options(arguments: argparse.Namespace) -> BuildOptions:
    from trtllm_replayssm.builders.flavour import FlavourName
    from trtllm_replayssm.builders.options import BuildOptions

    if arguments.quantize and arguments.weights != "checkpoint":
        raise ConfigError("build", "quantize", expected="--weights checkpoint beside it", got=arguments.weights)
    return BuildOptions(
        flavour=FlavourName(arguments.flavour), target=arguments.target,
        replay=replay_config(arguments, arguments.max_draft_len + 1),
        activation=ActivationDtype(arguments.activation), weights=arguments.quantize or arguments.weights,
        max_batch=arguments.max_batch, max_seq_len=arguments.max_seq_len,
        context_tokens=min(arguments.context_tokens, arguments.max_seq_len), tp_size=arguments.tp_size,
        tp_rank=_first_rank(arguments.tp_rank),
    )  # fmt: skip


def _first_rank(text: str) -> int:
    if text == "all":
        return 0
    if re.fullmatch(r"\d{1,9}", text, re.ASCII) is None:
        raise ConfigError("build", "tp_rank", expected='a number, or "all"', got=shown(text))
    return int(text)


def _source(arguments: argparse.Namespace, options: BuildOptions) -> AbstractContextManager[Source]:
    from trtllm_replayssm.builders.sources import checkpoint_source, random_source

    if (arguments.preset is None) == (arguments.checkpoint is None):
        raise ConfigError("build", "checkpoint", expected="a directory or --preset, one of them", got="both or none")
    if arguments.preset is None:
        if arguments.random_weights or arguments.layers:
            raise ConfigError("build", "random_weights", expected="--preset beside it", got="a checkpoint")
        return checkpoint_source(Path(arguments.checkpoint), options, mtp=not arguments.no_mtp)
    if not arguments.random_weights:
        raise ConfigError(
            "build", "preset", expected="--random-weights beside it: a preset is a geometry without weights", got="none"
        )
    layers = layer_range("build", arguments.layers)
    return nullcontext(random_source(arguments.preset, options, layers=layers, mtp=not arguments.no_mtp))

