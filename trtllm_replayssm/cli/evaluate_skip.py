"""`trtllm-replayssm eval skip`: bytes and time that skipping faded checkpoints saves on a GPU, kernel by kernel."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from trtllm_replayssm.checks import require_positive
from trtllm_replayssm.cli.evaluate_origin import origin
from trtllm_replayssm.cli.values import integers
from trtllm_replayssm.config import MAX_WINDOW
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.launches import LARGEST

PROMPT = 64
TOKENS = 512  # decoded tokens of each text that real decays are taken from


def add_skip(kinds: Any) -> None:
    """Register the command."""
    parser = kinds.add_parser(
        "skip", help="bytes and time that skipping the checkpoints of faded heads saves on a GPU",
        description="One Mamba-2 layer with made-up decays and with those that a checkpoint has on your texts, by the "
        "plain update and by the skipping one. Bytes: `ncu --profile-from-start off --csv --page raw --metrics "
        "dram__bytes_read.sum,dram__bytes_write.sum ... --repeats 0 > FILE`, then without ncu, with --counters FILE. "
        "Where it times, it first holds NaN in the faded checkpoints and asks for the update's bits with zero in them.",
    )  # fmt: skip
    parser.add_argument("model", help="Mamba-2 checkpoint directory with its tokenizer")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="texts of the real decays")
    parser.add_argument(
        "--shapes", default="super120b", help="layers of the made-up decays, comma separated (see `bench kernel`)"
    )
    parser.add_argument("--batch", type=int, default=128, help="rows of those layers (default 128)")
    parser.add_argument("--window", type=int, default=16, help="L (default 16)")
    parser.add_argument("--records", default="0,4,8,12,15,16", help="committed records h, comma separated")
    parser.add_argument("--repeats", type=int, default=20, help="timed launches of each step; 0: one, for a profiler")
    parser.add_argument("--counters", type=Path, metavar="FILE", help="profile of the same cases with --repeats 0")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the result file")
    parser.set_defaults(run=run_skip)


def run_skip(arguments: argparse.Namespace) -> int:
    """Measure the cases on this machine's GPU."""
    from trtllm_replayssm.bench.cases import kernel_shapes
    from trtllm_replayssm.bench.machine import describe
    from trtllm_replayssm.dtypes import ActivationDtype
    from trtllm_replayssm.runtime.evaluation.forcing import Model
    from trtllm_replayssm.runtime.evaluation.results import describe_run, write_results
    from trtllm_replayssm.runtime.evaluation.skip_cost import Grid, add_counters, skip_grid
    from trtllm_replayssm.runtime.evaluation.streams import text_streams
    from trtllm_replayssm.runtime.text.tokenizer import load_tokenizer
    from trtllm_replayssm.weights.checkpoint import Checkpoint

    names = arguments.shapes.split(",")
    if not set(names) <= set(kernel_shapes()):
        raise ConfigError("eval skip", "--shapes", expected=f"of {', '.join(kernel_shapes())}", got=arguments.shapes)
    records = integers("eval skip", "--records", arguments.records, least=0)
    require_positive("eval skip", "--batch", arguments.batch, most=LARGEST)
    require_positive("eval skip", "--window", arguments.window, most=MAX_WINDOW)
    if max(records) > arguments.window:
        raise ConfigError("eval skip", "--records", expected=f"at most --window {arguments.window}", got=max(records))
    if arguments.repeats < 0:
        raise ConfigError("eval skip", "--repeats", expected="at least 0", got=arguments.repeats)
    describe()  # refuses a machine without a GPU before the checkpoint is read
    model = Model.load(Checkpoint.open(arguments.model), device="cuda", activation=ActivationDtype.BFLOAT16)
    streams = text_streams(load_tokenizer(arguments.model), arguments.text, [1], PROMPT + TOKENS + 8)
    grid = Grid(
        shapes={name: kernel_shapes()[name] for name in names}, batch=arguments.batch, window=arguments.window,
        records=records, repeats=arguments.repeats,
    )  # fmt: skip
    rows = skip_grid(model, streams, PROMPT, TOKENS, grid)
    if arguments.counters:
        add_counters(rows, arguments.counters)
    meta = {**describe_run(model, streams, PROMPT), **origin(arguments, model)}
    write_results(arguments.json, "skip", meta, rows)
    for row in rows:
        times = f"{row['plain_us']:.1f} -> {row['skipping_us']:.1f} us" if arguments.repeats else ""
        gate = {True: ", bits equal", False: ", BITS DIFFER", None: ""}[row.get("equal_bits")]
        print(f"{row['shape']} {row['case']}: h = {row['h']}, {100 * row['faded']:.1f} % faded {times}{gate}")
    return 1 if any(row.get("equal_bits") is False for row in rows) else 0
