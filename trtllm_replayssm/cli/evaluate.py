"""`trtllm-replayssm eval kl | decays | tasks`: what state formats do to a checkpoint; other evaluations hang here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_replayssm.checks import require_positive
from trtllm_replayssm.cli.evaluate_files import add_file_commands
from trtllm_replayssm.cli.evaluate_origin import origin
from trtllm_replayssm.cli.evaluate_skip import add_skip
from trtllm_replayssm.cli.options import ACTIVATIONS
from trtllm_replayssm.cli.values import integers
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError

DEFAULT_CONFIGURATIONS = ",".join(
    [
        "shared-fp32-L16", "shared-fp16-sr-L16", "shared-fp8-sr-L16", "shared-nvfp4-sr-L16", "shared-nvfp4-rtn-L16",
        "separate-fp8-fp32-L16", "separate-nvfp4-fp32-L16", "separate-nvfp4-fp16-sr-L16", "separate-nvfp4-fp8-sr-L16",
    ]
)  # fmt: skip


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "eval",
        help="measure what state formats and windows do to outputs and states",
        description="Evaluations of a checkpoint on your texts, teacher-forced, against float32 states. "
        "Results are JSON files; `eval plot` draws them and needs the extra `eval`.",
    )
    kinds = parser.add_subparsers(title="what", metavar="WHAT", required=True)
    _add_kl(kinds)
    _add_decays(kinds)
    _add_tasks(kinds)
    add_skip(kinds)
    add_file_commands(kinds)


def _add_kl(kinds: Any) -> None:
    kl = kinds.add_parser(
        "kl", help="divergence of next-token distributions and error of states, by length",
        description="Decodes long text from a short prompt; KL(float32 conventional || configuration) over the last "
        "256 positions at each length. Goes on where it was stopped.",
    )  # fmt: skip
    _add_text_options(kl)
    kl.add_argument("--up-to", type=int, default=4096, metavar="N", help="longest length: 256 times a power of two")
    kl.add_argument("--configurations", default=DEFAULT_CONFIGURATIONS, help="comma separated, FORMATS-LWINDOW")
    kl.add_argument("--seeds", default="1", help="of stochastic rounding, comma separated: a row each (default 1)")
    kl.add_argument(
        "--step-tokens", type=int, metavar="T",
        help="widest step; steps never change a result, as the one that flushes has one token (default: the widest "
        "that the kernels of each format take, 16 on a CPU)",
    )  # fmt: skip
    kl.add_argument(
        "--no-states", action="store_true",
        help="keep no states of stopped runs: on a GPU decoding again is quicker than writing gigabytes",
    )  # fmt: skip
    kl.add_argument("--work", type=Path, help="folder of the journal and the reference (default: FILE with .work)")
    kl.set_defaults(run=run_kl)


def _add_decays(kinds: Any) -> None:
    decays = kinds.add_parser("decays", help="decays of each head on text, and what skipping faded reads would save")
    _add_text_options(decays)
    decays.add_argument("--tokens", type=int, default=512, help="decoded tokens of each text (default 512)")
    decays.set_defaults(run=run_decays)


def _add_tasks(kinds: Any) -> None:
    tasks = kinds.add_parser(
        "tasks", help="accuracy on generated tasks behind a long decoded text, paired with float32",
        description="Each task stands behind decoded text of a given length; the checkpoint's answer counts token by "
        "token. What a model cannot do with float32 states either says nothing: look at that column first.",
    )  # fmt: skip
    _add_text_options(tasks)
    tasks.add_argument("--lengths", default="0,512", help="decoded tokens before the task, comma separated")
    tasks.add_argument("--configurations", default=DEFAULT_CONFIGURATIONS, help="comma separated, FORMATS-LWINDOW")
    tasks.add_argument("--examples", type=int, default=8, help="of each task (default 8)")
    tasks.set_defaults(run=run_tasks)


def _add_text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint directory with its tokenizer")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="texts, a row each")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prompt (default 64; the paper: 512)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", choices=ACTIVATIONS, default="float32")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the result file")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def run_kl(arguments: argparse.Namespace) -> int:
    """Measure divergence by length."""
    from trtllm_replayssm.config import MAX_STEP_TOKENS
    from trtllm_replayssm.runtime.evaluation.configurations import parse_configuration
    from trtllm_replayssm.runtime.evaluation.forcing import widest_step
    from trtllm_replayssm.runtime.evaluation.journal import Journal
    from trtllm_replayssm.runtime.evaluation.kl import run_divergence
    from trtllm_replayssm.runtime.evaluation.reference import POSITIONS, Plan, ReferenceFiles
    from trtllm_replayssm.runtime.evaluation.results import describe_run, write_results

    if arguments.step_tokens is not None:
        require_positive("eval kl", "--step-tokens", arguments.step_tokens, most=MAX_STEP_TOKENS)
    lengths = [POSITIONS]
    while lengths[-1] < arguments.up_to:
        lengths.append(2 * lengths[-1])
    if lengths[-1] != arguments.up_to:
        raise ConfigError("eval kl", "--up-to", expected="256 times a power of two", got=arguments.up_to)
    seeds = integers("eval kl", "--seeds", arguments.seeds, least=0)
    named = [parse_configuration(name) for name in arguments.configurations.split(",")]
    model, streams = _open(arguments, seeds, arguments.prompt + lengths[-1] + 1)
    configurations = [
        replace(each, step_tokens=arguments.step_tokens or widest_step(model, each.replay)) for each in named
    ]
    plan = Plan(
        streams=tuple(streams), prompt=arguments.prompt, lengths=tuple(lengths), reference_step=MAX_STEP_TOKENS
    )
    work = arguments.work or arguments.json.with_suffix(".work")
    header = describe_run(model, streams, arguments.prompt)
    journal = Journal(work / "journal.jsonl", header)
    with _progress(arguments.quiet) as report:
        run_divergence(
            model, plan, configurations, journal, ReferenceFiles(work), report, keep_states=not arguments.no_states
        )
    meta = {**header, **origin(arguments, model), "positions": POSITIONS}
    write_results(arguments.json, "kl", meta, journal.rows)
    for row in journal.rows:
        kl = "diverged" if row["kl"] is None else f"{row['kl']:.3e}"
        print(f"{row['configuration']:28} N={row['length']:<6} KL {kl}")
    return 0


def run_decays(arguments: argparse.Namespace) -> int:
    """Measure decays."""
    from trtllm_replayssm.runtime.evaluation.decays import describe_decays, measure_decays
    from trtllm_replayssm.runtime.evaluation.results import describe_run, write_results

    require_positive("eval decays", "--tokens", arguments.tokens)
    model, streams = _open(arguments, [1], arguments.prompt + arguments.tokens + 8)
    with _progress(arguments.quiet) as report:
        done = 0

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            report("decays", done, arguments.tokens)

        found = measure_decays(model, streams, arguments.prompt, arguments.tokens, advance)
    row = describe_decays(found, model.checkpoint.geometry.ssm)
    meta = {**describe_run(model, streams, arguments.prompt), **origin(arguments, model)}
    write_results(arguments.json, "decays", meta, [row])
    for saved in row["saved"]:
        print(f"{saved['output']:9} L={saved['window']:<3} skipping saves {100 * saved['saved']:.1f} % of the bytes")
    return 0


def run_tasks(arguments: argparse.Namespace) -> int:
    """Measure accuracy on generated tasks."""
    from trtllm_replayssm.runtime.evaluation.configurations import parse_configuration
    from trtllm_replayssm.runtime.evaluation.forcing import widest_step
    from trtllm_replayssm.runtime.evaluation.results import describe_run, write_results
    from trtllm_replayssm.runtime.evaluation.tasks import run_task_grid

    require_positive("eval tasks", "--examples", arguments.examples)
    lengths = integers("eval tasks", "--lengths", arguments.lengths, least=0)
    named = [parse_configuration(name) for name in arguments.configurations.split(",")]
    model, streams = _open(arguments, [1], arguments.prompt + max(lengths) + 1)
    configurations = [replace(each, step_tokens=widest_step(model, each.replay)) for each in named]
    tokenizer = _tokenizer(arguments)
    with _progress(arguments.quiet) as report:
        rows = run_task_grid(
            model, tokenizer, streams, configurations, lengths, report, prompt=arguments.prompt,
            examples=arguments.examples,
        )  # fmt: skip
    meta = {
        **describe_run(model, streams, arguments.prompt), **origin(arguments, model),
        "examples": arguments.examples,
    }  # fmt: skip
    write_results(arguments.json, "tasks", meta, rows)
    for row in rows:
        print(
            f"{row['task']:9} N={row['length']:<6} {row['configuration']:28} {100 * row['accuracy']:5.1f} % "
            f"(fp32 {100 * row['fp32']:.1f} %, won {row['won']}, lost {row['lost']})"
        )
    return 0


def _tokenizer(arguments: argparse.Namespace) -> Any:
    from trtllm_replayssm.runtime.text.tokenizer import load_tokenizer

    return load_tokenizer(arguments.model)


def _open(arguments: argparse.Namespace, seeds: list[int], tokens: int) -> tuple[Any, Any]:
    from trtllm_replayssm.runtime.evaluation.forcing import Model
    from trtllm_replayssm.runtime.evaluation.streams import text_streams
    from trtllm_replayssm.weights.checkpoint import Checkpoint

    require_positive("eval", "--prompt", arguments.prompt)
    checkpoint = Checkpoint.open(arguments.model)
    model = Model.load(checkpoint, device=arguments.device, activation=ActivationDtype(arguments.dtype))
    return model, text_streams(_tokenizer(arguments), arguments.text, seeds, tokens)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for each thing that is decoded."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield report
