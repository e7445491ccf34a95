"""`trtllm-replayssm tune`: chooses window and launch for a model, GPU, batch, T and acceptance, and says why."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_replayssm.bench.cases import KernelCase, Operation, kernel_shapes
from trtllm_replayssm.checks import read_text, require_positive
from trtllm_replayssm.cli.options import add_replay_options, replay_config
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.launches import LARGEST
from trtllm_replayssm.runtime.tuning import VARIABLE, add_entry, read_tune_file, tune_key
from trtllm_replayssm.shapes import ModelGeometry, SsmShape
from trtllm_replayssm.spec.tuning import choose_window, fit_times
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.presets import preset_geometry

_WINDOWS = (16, 32)  # two windows and their records fix the three numbers of the time model


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "tune",
        help="choose the window and the launch for a model, GPU, batch and acceptance",
        description="Chooses the window L by the traffic model, and by kernel times where there are any, and with "
        "--measure how the update is launched at this batch; writes both to a file that engines read where the "
        f"variable {VARIABLE} names it.",
    )  # fmt: skip
    parser.add_argument("model", help="a checkpoint directory, or the name of a preset")
    parser.add_argument("--gpu", default="cpu", help='name as the driver gives it, "NVIDIA H200" (default: cpu)')
    parser.add_argument("--batch", type=int, default=8, help="rows of a step (default 8)")
    parser.add_argument("--step-tokens", type=int, default=1, metavar="T", help="base token and drafts (default 1)")
    parser.add_argument("--accepted", type=float, help="mean tokens committed by a step (default: all)")
    parser.add_argument(
        "--results", type=Path, nargs="*", default=[], metavar="FILE",
        help="kernel times: JSON of bench kernel, one object a line or {meta, rows}",
    )  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="time the native kernels here (needs the GPU)")
    parser.add_argument("--keep-window", action="store_true", help="take --window as it is, choose the launch only")
    parser.add_argument("--file", type=Path, required=True, help="the file of tuned windows and launches")
    add_replay_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Choose, explain, record."""
    geometry = _geometry(arguments.model)
    tokens = arguments.step_tokens
    if not arguments.keep_window:
        arguments.window = max(arguments.window, tokens)  # what is chosen replaces it
    config = replay_config(arguments, tokens)
    accepted = float(tokens) if arguments.accepted is None else arguments.accepted
    require_positive("tune", "--batch", arguments.batch, most=LARGEST)
    if not 1 <= accepted <= tokens:
        raise ConfigError("tune", "--accepted", expected=f"1..{tokens}, the tokens of a step", got=accepted)
    read_tune_file(arguments.file)  # one that cannot be added to is refused before anything is measured
    window, gpu = _window(arguments, geometry.ssm, config, accepted)
    launch = _launch(arguments, geometry.ssm, replace(config, window=window["window"]), accepted)
    why = [*window.pop("why"), *launch.pop("why")]
    for line in why:
        print(line)
    key = tune_key(geometry.ssm, config, gpu)
    add_entry(arguments.file, key, {"batch": arguments.batch, "accepted": accepted, **window, **launch, "why": why})
    print(f"written to {arguments.file}: {key}, batch {arguments.batch}")
    return 0


def _window(
    arguments: argparse.Namespace, shape: SsmShape, config: ReplayConfig, accepted: float
) -> tuple[dict[str, Any], str]:
    """The entry's fields of the window, with why; and the GPU's name."""
    if arguments.keep_window:
        gpu = _measured_gpu() if arguments.measure else arguments.gpu
        return {"window": config.window, "why": [f"taken: L = {config.window}, as given"]}, gpu
    name = shape_name(shape)
    plain = config.recurrence is StateFormat.FLOAT32 and config.read is None  # what times are known of
    rows, gpu = ([], _measured_gpu()) if arguments.measure and not plain else _times(arguments, shape)
    times = fit_times(rows, name, arguments.batch, config.max_step_tokens) if name and plain else None
    choice = choose_window(shape, config, accepted, times)
    fields = {"window": choice.window, "by_traffic": choice.by_traffic, "by_time": choice.by_time}
    return {**fields, "why": list(choice.why)}, gpu


def _launch(
    arguments: argparse.Namespace, shape: SsmShape, config: ReplayConfig, accepted: float
) -> dict[str, Any]:
    """The entry's fields of the launch, with why."""
    if not arguments.measure:
        return {"launch": None, "why": ["launch: left to the library; --measure times others on the GPU"]}
    from trtllm_replayssm.bench.launch_timing import tune_launch
    from trtllm_replayssm.ops.native_library import installed_library

    case = _case(shape, arguments.batch, config)
    choice = tune_launch(case, max(1, round(accepted)), installed_library())
    return {"launch": None if choice.launch is None else choice.launch.entry(), "why": list(choice.why)}


def _case(shape: SsmShape, batch: int, config: ReplayConfig) -> KernelCase:
    name = shape_name(shape)
    if name is None:
        raise ConfigError("tune", "--measure", expected=f"a layer shape of {', '.join(kernel_shapes())}", got=shape)
    return KernelCase(
        shape_name=name, shape=shape, suite="tune", operation=Operation.UPDATE, rows=batch,
        tokens=config.max_step_tokens, window=config.window, recurrence=config.recurrence, read=config.read,
    )  # fmt: skip


def shape_name(shape: SsmShape) -> str | None:
    """The benchmark's name of a layer shape, None for one it does not know."""
    for name, known in kernel_shapes().items():
        if replace(known, conv_kernel=shape.conv_kernel, conv_bias=shape.conv_bias) == shape:
            return name
    return None


def _geometry(model: str) -> ModelGeometry:
    if not Path(model).is_dir():
        return preset_geometry(model)
    with Checkpoint.open(model) as checkpoint:
        return checkpoint.geometry


def _times(arguments: argparse.Namespace, shape: SsmShape) -> tuple[list[dict[str, Any]], str]:
    """Benchmark rows of the GPU, and its name."""
    if arguments.measure:
        return _measure(shape, arguments.batch, arguments.step_tokens)
    found: list[dict[str, Any]] = []
    for path in arguments.results:
        found += read_rows(path)
    return [r for r in found if r.get("gpu") == arguments.gpu], arguments.gpu


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a benchmark file in either form. Raises ConfigError for another file."""
    text = read_text("tune", "--results", path)
    try:
        if text.lstrip().startswith('{"meta"'):
            rows = list(json.loads(text)["rows"])
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        known = all(_readable(row) for row in rows)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        known = False
    if not known:
        raise ConfigError("tune", f"--results {path}", expected="JSON of bench kernel", got="another file")
    return rows


def _readable(row: dict[str, Any]) -> bool:
    """Whether `fit_times` can read a row; one that is not of the update it passes over."""
    if row.get("what") != "update":
        return True
    numbers = [row["B"], row["T"], row["L"], *row["by_h"].values()]
    return all(math.isfinite(n) and n > 0 for n in numbers) and all(int(h) >= 0 for h in row["by_h"]) and "shape" in row


def _measured_gpu() -> str:
    from trtllm_replayssm.bench.machine import describe

    return describe()["gpu"]


def _measure(shape: SsmShape, batch: int, tokens: int) -> tuple[list[dict[str, Any]], str]:
    from trtllm_replayssm.bench.run import entry, run_cases
    from trtllm_replayssm.bench.timing import copy_bandwidth
    from trtllm_replayssm.ops.native_library import installed_library

    gpu = _measured_gpu()
    cases = [_case(shape, batch, ReplayConfig(window=window, max_step_tokens=tokens)) for window in _WINDOWS]
    library, bandwidth = installed_library(), copy_bandwidth()
    return [entry(row) for row in run_cases(cases, library, bandwidth, rounds=20)], gpu
