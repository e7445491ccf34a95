"""`trtllm-replayssm bench throughput`: a request file through the engine, against the conventional state cache."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trtllm_replayssm.cli.options import (
    add_drafter_options,
    add_replay_options,
    replay_config,
    require_positive_flags,
    speculative_config,
)
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.whole_file import growing_file

_NOISE = {"float32": 5e-3, "bfloat16": 0.125, "float16": 0.02}  # logits; see docs/serving.md
_BATCH = 8  # sequences at once where neither flag is given
_DESCRIPTION = """Runs a file of requests (one JSON object a line: task_id, prompt or input_ids, output_tokens) greedily
and past end tokens, first with replay and then with the conventional state cache, and compares the tokens of both: a
speed-up is reported only when they agree but for near ties. The report has trtllm-bench's keys; percentiles of
acceptance lengths are over decode steps."""


def add_command(kinds: Any) -> None:
    """Register the command."""
    parser = kinds.add_parser("throughput", help="a request file through the engine", description=_DESCRIPTION)
    parser.add_argument("model", help="checkpoint directory")
    parser.add_argument("--dataset", type=Path, required=True, metavar="FILE", help="requests, JSON lines")
    parser.add_argument("--num-requests", type=int, metavar="N", help="only the first N (default: all)")
    parser.add_argument("--concurrency", type=int, metavar="N", help="requests in flight at most (default: the batch)")
    parser.add_argument("--request-rate", type=float, metavar="R", help="arrivals a second at random moments")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="untimed requests before (default 2)")
    parser.add_argument("--max-batch-size", type=int, help="sequences at once (default: --concurrency, or 8)")
    parser.add_argument("--max-seq-len", type=int, help="prompt and output tokens of one sequence")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", choices=sorted(_NOISE), default="float32", help="of activations (default float32)")
    parser.add_argument("--noise", type=float, help="margin in logits below which a difference is a near tie")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--report-json", type=Path, metavar="FILE", help="write the report")
    add_drafter_options(parser)
    add_replay_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 when the two runs disagree."""
    from trtllm_replayssm.bench.machine import describe
    from trtllm_replayssm.bench.throughput.dataset import read_dataset
    from trtllm_replayssm.bench.throughput.drive import Traffic
    from trtllm_replayssm.bench.throughput.run import ThroughputSetup, measure
    from trtllm_replayssm.runtime.session.device import usable_device

    require_positive_flags("bench throughput", arguments, "num_requests", "concurrency", "max_batch_size")
    noise = _NOISE[arguments.dtype] if arguments.noise is None else arguments.noise
    for flag, value in (("--warmup", arguments.warmup), ("--noise", noise)):
        if not value >= 0:
            raise ConfigError("bench throughput", flag, expected="0 or more", got=value)
    requests = read_dataset(arguments.dataset, arguments.num_requests)
    speculative = speculative_config(arguments)
    batch, concurrency = _sizes(arguments)
    setup = ThroughputSetup(
        model=arguments.model, dtype=arguments.dtype, device=arguments.device,
        max_batch_size=batch, max_seq_len=arguments.max_seq_len, speculative=speculative,
        replay=replay_config(arguments, 1 if speculative is None else 1 + speculative.draft_len),
        warm_up=arguments.warmup,
    )  # fmt: skip
    traffic = Traffic(concurrency=concurrency, request_rate=arguments.request_rate, seed=arguments.seed)
    with nullcontext() if arguments.report_json is None else growing_file(arguments.report_json) as file:
        report = {**measure(setup, requests, traffic, noise), "machine": describe(usable_device(arguments.device))}
        if file is not None:
            file.write(json.dumps(report, indent=2) + "\n")
    _print(report)
    return 0 if report["text_equality"]["green"] else 1


def _sizes(arguments: argparse.Namespace) -> tuple[int, int]:
    """Sequences at once and requests in flight; each is the other where one is given."""
    batch, concurrency = arguments.max_batch_size, arguments.concurrency
    if batch is None:
        batch = _BATCH if concurrency is None else concurrency
    return batch, batch if concurrency is None else concurrency


def _print(report: dict[str, Any]) -> None:
    for name, fields in (("replay", report), ("conventional", report["conventional"])):
        speed, stream = fields["performance"], fields["streaming_metrics"]
        accepted = fields.get("decoding_stats", {}).get("acceptance_length")
        print(
            f"{name:13} {speed['system_output_throughput_tok_s']:.1f} output tokens/s, "
            f"{speed['request_throughput_req_s']:.2f} requests/s, first token {stream['avg_ttft_ms']:.1f} ms, "
            f"then {stream['avg_tpot_ms']:.2f} ms each" + (f", {accepted:.2f} a step" if accepted else "")
        )
    equality, ratio = report["text_equality"], report["speed_up_over_conventional"]
    print(
        f"text equal for {equality['equal']} of {report['request_info']['num_requests']} requests, "
        f"{equality['near_ties']} near ties, {equality['different']} different"
        + ("" if ratio is None else f"; {ratio:.3f} times the conventional output rate")
    )
