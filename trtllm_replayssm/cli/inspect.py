"""`trtllm-replayssm inspect`: geometry, memory per slot, traffic and best window of a model; engine bundles."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.inspect_bundle import summarise_parts
from trtllm_replayssm.bundle_parts import bundle_parts
from trtllm_replayssm.cli.options import ACTIVATIONS, add_replay_options, replay_config
from trtllm_replayssm.config import EVERY_BATCH, PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.runtime.session.tensorrt_contexts import context_memory
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.spec import traffic
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.inspect import summarise
from trtllm_replayssm.weights.presets import preset_geometry, preset_names

MIB = 1 << 20


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "inspect",
        help="geometry, memory per slot, state traffic, best window; what an engine bundle holds",
        description="What a checkpoint or a preset holds, needs and moves, or what a bundle of engines was built from. "
        "Needs no GPU.",
        epilog=f"Presets: {', '.join(preset_names())}",
    )
    parser.add_argument("model", help="a checkpoint directory, an engine bundle, or the name of a preset")
    parser.add_argument("--step-tokens", type=int, default=1, metavar="T", help="tokens of a step (1: plain decoding)")
    parser.add_argument("--accepted", type=float, help="mean tokens committed by a step (default: all)")
    parser.add_argument("--max-seq-len", type=int, default=8192, help="positions of a slot's KV cache (default 8192)")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="bfloat16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_replay_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Inspect and print."""
    if parts := _bundle(Path(arguments.model)):
        if arguments.json:
            print(json.dumps(parts[0] if parts[0]["build"]["tp_size"] == 1 else {"ranks": parts}, indent=2))
        else:
            for part in parts:
                _print_bundle(part)
        return 0
    config = replay_config(arguments, arguments.step_tokens)
    accepted = float(arguments.step_tokens) if arguments.accepted is None else arguments.accepted
    pool = PoolConfig(slots=1, max_seq_len=arguments.max_seq_len, activation=ActivationDtype(arguments.activation))
    if Path(arguments.model).is_dir():
        with Checkpoint.open(arguments.model) as checkpoint:
            report, geometry = summarise(checkpoint), checkpoint.geometry
    else:
        geometry = preset_geometry(arguments.model)
        report = summarise(geometry)
    report["slot_bytes"] = slot_memory(geometry, config, pool)
    report["traffic"] = state_traffic(geometry, config, pool, accepted)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, pool.max_seq_len)
    return 0


def _bundle(directory: Path) -> list[dict[str, Any]]:
    """Every rank of a bundle, with the execution contexts of a session of all its slots; empty where it is none."""
    parts = summarise_parts(directory)
    for part, report in zip(bundle_parts(directory), parts, strict=True):
        contexts = context_memory(read_manifest(part), report["build"]["max_batch"], EVERY_BATCH)
        report["memory"]["recorded_contexts"] = contexts.recorded
        report["memory"]["context_bytes"] = contexts.total
    return parts


def slot_memory(geometry: ModelGeometry, config: ReplayConfig, pool: PoolConfig) -> dict[str, dict[str, int]]:
    """Bytes of one slot by kind, with replay and conventionally (one state per token of a step, float32)."""
    kinds = ("checkpoint", "read_copy", "snapshots", "rings", "conv_windows", "kv", "cursors", "total")
    slots = {
        "replay": traffic.slot_bytes(geometry, config, pool),
        "conventional": traffic.conventional_slot_bytes(geometry, StateFormat.FLOAT32, config.max_step_tokens, pool),
    }
    return {name: {kind: getattr(slot, kind) for kind in kinds} for name, slot in slots.items()}


def state_traffic(
    geometry: ModelGeometry, config: ReplayConfig, pool: PoolConfig, accepted: float
) -> dict[str, float | int]:
    """Bytes of state and records per committed token over all SSM layers, and the window that moves the fewest."""
    shape, step, item = geometry.ssm, config.max_step_tokens, pool.activation.itemsize
    layers = len(geometry.ssm_layers)
    replay = layers * traffic.window_bytes_per_token(shape, config, step, accepted, item)
    step_bytes = traffic.conventional_step_bytes(shape, StateFormat.FLOAT32, step, item).total
    conventional = layers * step_bytes / accepted
    return {
        "window": config.window,
        "step_tokens": step,
        "mean_accepted": accepted,
        "replay_bytes_per_token": round(replay),
        "conventional_bytes_per_token": round(conventional),
        "conventional_over_replay": round(conventional / replay, 3),
        "best_window": traffic.best_window(shape, config, step, accepted, item),
    }


def _print(report: dict[str, Any], positions: int) -> None:
    print(f"{report['name']} ({report['family']})")
    print(f"  layers      {report['layer_pattern']}  (M recurrent, * attention, - MLP, E experts)")
    if report["mtp_pattern"]:
        print(f"  MTP head    {report['mtp_pattern']}")
    print(f"  parameters  {report['parameters']['total']:,}")
    for fmt, size in report.get("bytes", {}).items():
        print(f"  {fmt:11} {size:,} bytes")
    for name, count in report.get("unused", {}).items():
        print(f"  not used    {name} ({count})")
    for note in report.get("notes", []):
        print(f"  note        {note}")
    print("memory of one slot, MiB           replay  conventional")
    slots = report["slot_bytes"]
    for kind, size in slots["replay"].items():
        other = slots["conventional"][kind]
        if size or other:
            shown = f"kv ({positions} positions)" if kind == "kv" else kind
            print(f"  {shown:29} {size / MIB:9.2f} {other / MIB:13.2f}")
    moved = report["traffic"]
    print(
        f"state traffic per token, MiB: replay {moved['replay_bytes_per_token'] / MIB:.2f}, conventional "
        f"{moved['conventional_bytes_per_token'] / MIB:.2f} ({moved['conventional_over_replay']}x), at L = "
        f"{moved['window']}, T = {moved['step_tokens']}, {moved['mean_accepted']:g} accepted"
    )
    print(f"best window by the traffic model: L = {moved['best_window']}")


def _print_bundle(report: dict[str, Any]) -> None:
    built, memory, matmuls = report["build"], report["memory"], report["matmuls"]
    share = "" if built["tp_size"] == 1 else f", rank {built['tp_rank']} of {built['tp_size']}"
    print(f"{report['name']}{share}: engines of {built['flavour']} {built['tensorrt_version']} for {built['target']}")
    print(f"  of          {built['checkpoint']} ({built['weights']})")
    for title, layers in (("layers", report["layers"]), ("mtp layers", report["mtp_layers"])):
        if layers:
            print(f"  {title:11} {', '.join(f'{layers.count(kind)} {kind}' for kind in dict.fromkeys(layers))}")
    for name, counts in report["programs"].items():
        print(f"  {name:11} {', '.join(f'{count} {what}' for what, count in counts.items())}")
    for name, profile in report["profiles"].items():
        rows, tokens = profile["rows"], profile["tokens"]
        print(f"  profile     {name}: rows {rows[0]}..{rows[2]}, tokens {tokens[0]}..{tokens[2]}")
    for name, running in matmuls["running"].items():
        formats = {fmt: list(running.values()).count(fmt) for fmt in sorted(set(running.values()))}
        shown = ", ".join(f"{count} in {fmt}" for fmt, count in formats.items()) or "none in FP8 or NVFP4"
        print(f"  matmuls     {name}: {shown} (of {len(matmuls['quantised_weights'])} with quantised weights)")
    for title, tensors in (("inputs", report["bindings"]["main"]), ("outputs", report["outputs"]["main"])):
        print(f"  {title:11} {', '.join(f'{name} {what}' for name, what in tensors.items())}")
    largest = memory["largest_engine_bytes"] / MIB
    print(f"  engines     {memory['engine_bytes'] / MIB:.1f} MiB, the largest {largest:.1f}")
    print(f"  beside      {memory['weights_beside_bytes'] / MIB:.1f} MiB of weights that native operations read")
    size = memory["context_bytes"] / MIB
    print(f"  contexts    {memory['recorded_contexts']:,} of recorded steps; all with their scratch {size:.1f} MiB")
    for name, size in memory["scratch_bytes"].items():
        print(f"  scratch     {name}: {size / MIB:.1f} MiB")
