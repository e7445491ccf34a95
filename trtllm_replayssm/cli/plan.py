"""`trtllm-replayssm plan`: how many sequences a GPU holds beside a model, and what lies where."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from trtllm_replayssm.bundle_parts import bundle_parts
from trtllm_replayssm.cli.options import ACTIVATIONS, add_replay_options, replay_config, require_positive_flags
from trtllm_replayssm.config import EVERY_BATCH, PoolConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.runtime.bundle import file_bytes
from trtllm_replayssm.runtime.device_memory import MAX_PLANNED_BATCH, free_device_bytes
from trtllm_replayssm.runtime.planner import GIB, STEP_TOKENS, MemoryPlan, plan_memory, prompts_in_progress, step_tokens
from trtllm_replayssm.runtime.session.tensorrt_contexts import ContextMemory, context_memory
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.precision_maps import published_format
from trtllm_replayssm.weights.presets import preset_geometry, preset_names
from trtllm_replayssm.weights.sizes import checkpoint_bytes, model_bytes
from trtllm_replayssm.weights.tensor_parallel import TensorParallel, shard_geometry

_BUILT = ("max_seq_len", "draft_len", "state_cache", "activation", "window", "recurrence", "rounding", "read")


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "plan", help="sequences that a GPU holds beside a model",
        description="Memory of weights, of a step and of every slot, and the slots that fit: the plan by which the "
        "engine admits requests. Needs no GPU when --gpu-memory is given.",
        epilog=f"Presets: {', '.join(preset_names())}",
    )  # fmt: skip
    parser.add_argument("model", help="a checkpoint directory, the name of a preset, or a bundle, as it was built")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory free for us (default: this GPU's)")
    parser.add_argument("--max-batch-size", type=int, help="slots that are wanted: refused when they do not fit")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="positions of a slot (default 4096)")
    parser.add_argument(
        "--max-num-tokens", type=int,
        help=f"prompt tokens of one pass (default {STEP_TOKENS}, or all rows' tokens where they are more)",
    )  # fmt: skip
    parser.add_argument("--prefill-chunk", type=int, help="tokens of one prompt chunk (default: all of a pass)")
    parser.add_argument("--enable-block-reuse", action="store_true", help="with a prefix cache")
    parser.add_argument("--draft-len", type=int, default=0, help="drafts of one step (default 0)")
    parser.add_argument("--free-gpu-memory-fraction", type=float, default=0.9, help="share for slots (default 0.9)")
    parser.add_argument("--state-cache", choices=["replay", "conventional"], default="replay")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="bfloat16")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_replay_options(parser)
    defaults = {name: parser.get_default(name) for name in _BUILT}
    parser.set_defaults(**dict.fromkeys(_BUILT), run=run, defaults=defaults)  # what is None was not given


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; an error when more slots are wanted than fit."""
    if not 0 < arguments.free_gpu_memory_fraction <= 1:
        raise ConfigError(
            "plan", "free_gpu_memory_fraction", expected="in (0, 1]", got=arguments.free_gpu_memory_fraction
        )
    require_positive_flags("plan", arguments, "max_num_tokens", "max_batch_size", "prefill_chunk")
    if arguments.gpu_memory is not None and not 0 < arguments.gpu_memory * GIB < math.inf:
        raise ConfigError("plan", "--gpu-memory", expected="a positive number of GiB", got=arguments.gpu_memory)
    parts = bundle_parts(Path(arguments.model))
    if parts:
        _refuse_given(arguments)
    for name, default in arguments.defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    plan, bundle = _bundle_plan(arguments, parts[0]) if parts else (_plan(arguments), None)
    if arguments.json:
        made = {} if bundle is None else {"contexts": bundle[0].recorded, "built_for": bundle[1]}
        print(json.dumps({"slots": plan.slots, **made, "bytes": dict(plan.table())}, indent=2))
    else:
        print("\n".join(plan.lines()))
        if bundle is not None:
            print(f"{'contexts of recorded steps':28} {bundle[0].recorded:14,}")
            print(f"{'slots it was built for':28} {bundle[1]:14,}")
    if arguments.max_batch_size is not None:
        plan.require(arguments.max_batch_size)
    return 0


def _refuse_given(arguments: argparse.Namespace) -> None:
    """ConfigError for an option that a bundle answers itself, also where both say the same."""
    for name in arguments.defaults:
        if getattr(arguments, name) is not None:
            raise ConfigError(
                "plan", f"--{name.replace('_', '-')}", expected="none: a bundle is planned as the bundle was built",
                got=getattr(arguments, name),
            )  # fmt: skip


def _plan(arguments: argparse.Namespace) -> MemoryPlan:
    pool = PoolConfig(slots=1, max_seq_len=arguments.max_seq_len, activation=ActivationDtype(arguments.activation))
    geometry, weights = _model(arguments.model, pool.activation.itemsize)
    tokens = arguments.max_num_tokens or step_tokens(
        arguments.max_batch_size or MAX_PLANNED_BATCH, arguments.draft_len
    )
    return plan_memory(
        geometry, replay_config(arguments, 1 + arguments.draft_len), pool, memory=_memory(arguments), weights=weights,
        conventional=arguments.state_cache == "conventional", prompt_tokens=tokens,
        prompts=prompts_in_progress(tokens, arguments.prefill_chunk, reuse=arguments.enable_block_reuse),
        fraction=arguments.free_gpu_memory_fraction,
    )  # fmt: skip


def _bundle_plan(arguments: argparse.Namespace, part: Path) -> tuple[MemoryPlan, tuple[ContextMemory, int]]:
    """Of one GPU of a bundle; its engines have execution contexts too, and a batch that they were built for."""
    manifest = read_manifest(part)
    build = manifest.build
    slots = arguments.max_batch_size or build.max_batch
    if slots > build.max_batch:
        most = f"at most {build.max_batch}, for which the bundle was built"
        raise ConfigError("plan", "--max-batch-size", expected=most, got=slots)
    contexts = context_memory(manifest, slots, EVERY_BATCH)
    chunk = arguments.prefill_chunk or build.context_tokens
    if chunk > build.context_tokens:
        most = f"at most {build.context_tokens}, the context_tokens that the bundle was built for"
        raise ConfigError("plan", "--prefill-chunk", expected=most, got=chunk)
    tokens = arguments.max_num_tokens or step_tokens(slots, arguments.draft_len)
    plan = plan_memory(
        shard_geometry(manifest.geometry, TensorParallel(build.tp_size)), manifest.replay, manifest.pool(1),
        memory=_memory(arguments), weights=file_bytes(part), contexts=contexts.total,
        prompt_tokens=tokens, fraction=arguments.free_gpu_memory_fraction,
        prompts=prompts_in_progress(tokens, chunk, reuse=arguments.enable_block_reuse),
    )  # fmt: skip
    return plan, (contexts, build.max_batch)


def _memory(arguments: argparse.Namespace) -> int:
    return _this_gpu() if arguments.gpu_memory is None else int(arguments.gpu_memory * GIB)


def _this_gpu() -> int:
    try:
        return free_device_bytes("cuda")
    except ConfigError as error:
        raise ConfigError(
            "plan", "--gpu-memory", expected="GiB where torch sees no GPU", got="nothing",
            hint="Give the memory of the GPU that is meant: --gpu-memory GIB",
        ) from error  # fmt: skip


def _model(name: str, itemsize: int) -> tuple[ModelGeometry, int]:
    """Geometry and bytes of the parameters on a GPU."""
    if Path(name).is_dir():
        with Checkpoint.open(name) as checkpoint:
            return checkpoint.geometry, checkpoint_bytes(checkpoint, itemsize)
    geometry = preset_geometry(name)
    return geometry, model_bytes(geometry, lambda parameter: published_format(geometry.name, parameter), itemsize)
