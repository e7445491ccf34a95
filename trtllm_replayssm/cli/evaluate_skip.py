"""`trtllm-replayssm eval skip`: bytes and time that skipping faded checkpoints saves on a GPU, kernel by kernel."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of heads that fade at once, in the made-up cases
TOKENS = 512  # decoded tokens of each text that real decays are taken from
OUTPUTS = ("bfloat16", "float32")  # types whose half last place is the threshold for real decays


def add_skip(kinds: Any) -> None:
    """Register the command."""
    parser = kinds.add_parser(
        "skip", help="bytes and time that skipping the checkpoints of faded heads saves on a GPU",
        description="One Mamba-2 layer with made-up decays and with those that a checkpoint has on your texts, by the "
        "plain update and by the skipping one. Bytes: `ncu --profile-from-start off --csv --page raw --metrics "
        "dram__bytes_read.sum,dram__bytes_write.sum ... --repeats 0 > FILE`, then without ncu, with --counters FILE.",
    )  # fmt: skip
    parser.add_argument("model", help="Mamba-2 checkpoint directory with its tokenizer")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="texts of the real decays")
    parser.add_argument("--shape", default="super120b", help="layer of the made-up decays (see `bench kernel`)")
    parser.add_argument("--batch", type=int, default=128, help="rows of that layer (default 128)")
    parser.add_argument("--window", type=int, default=16, help="L (default 16)")
    parser.add_argument("--records", default="0,4,8,12,15,16", help="committed records h, comma separated")
    parser.add_argument("--repeats", type=int, default=20, help="timed launches of each step; 0: one, for a profiler")
    parser.add_argument("--counters", type=Path, metavar="FILE", help="profile of the same cases with --repeats 0")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the result file")
    parser.set_defaults(run=run_skip)


def run_skip(arguments: argparse.Namespace) -> int:
    """Measure the cases on this machine's GPU."""
    import torch

    from trtllm_replayssm._version import __version__
    from trtllm_replayssm.bench.cases import kernel_shapes
    from trtllm_replayssm.dtypes import ActivationDtype
    from trtllm_replayssm.runtime.evaluation.decays import THRESHOLDS, measure_decays
    from trtllm_replayssm.runtime.evaluation.forcing import Model
    from trtllm_replayssm.runtime.evaluation.results import write_results
    from trtllm_replayssm.runtime.evaluation.skip_cost import add_counters, skip_rows
    from trtllm_replayssm.runtime.evaluation.skip_problem import SkipProblem, even_case, measured_case
    from trtllm_replayssm.runtime.evaluation.streams import text_streams
    from trtllm_replayssm.runtime.text.tokenizer import load_tokenizer
    from trtllm_replayssm.weights.checkpoint import Checkpoint

    model = Model.load(Checkpoint.open(arguments.model), device="cuda", activation=ActivationDtype.BFLOAT16)
    records = [int(h) for h in arguments.records.split(",")]
    shape, window, batch = kernel_shapes()[arguments.shape], arguments.window, arguments.batch
    problem = SkipProblem(shape, batch, window, model.device)
    cases = [even_case(batch, shape.heads, window, s, THRESHOLDS["bfloat16"], model.device) for s in SHARES]
    rows = [{"shape": arguments.shape, **row} for row in skip_rows(problem, cases, records, arguments.repeats)]
    del problem

    prompt, name = 64, Path(arguments.model).name
    streams = text_streams(load_tokenizer(arguments.model), arguments.text, [1], prompt + TOKENS + 8)
    decays = torch.from_numpy(measure_decays(model, streams, prompt, TOKENS, lambda tokens: None))
    real = model.checkpoint.geometry.ssm
    many = batch * shape.heads * shape.head_dim // (real.heads * real.head_dim)  # as many bytes
    cases = [
        measured_case(f"decays of {name}, {out} outputs", decays, many, window, THRESHOLDS[out], model.device)
        for out in OUTPUTS
    ]
    problem = SkipProblem(real, many, window, model.device)
    rows += [{"shape": name, **row} for row in skip_rows(problem, cases, records, arguments.repeats)]
    if arguments.counters:
        add_counters(rows, arguments.counters)
    meta = {
        "checkpoint": name, "device_name": torch.cuda.get_device_name(), "torch": torch.__version__,
        "version": __version__, "rows": [{"text": s.text, "digest": s.digest} for s in streams],
    }  # fmt: skip
    write_results(arguments.json, "skip", meta, rows)
    for row in rows:
        times = f"{row['plain_us']:.1f} -> {row['skipping_us']:.1f} us" if arguments.repeats else ""
        print(f"{row['shape']} {row['case']}: h = {row['h']}, {100 * row['faded']:.1f} % faded {times}")
    return 0
