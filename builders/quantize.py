"""Quantise a checkpoint to NVFP4 (and FP8) in the layout of NVIDIA ModelOpt, tensor by tensor.

Weights only: no calibration data is used, so that no input_scale is written. The destination appears complete or not
at all: everything is written to a folder beside it, which is renamed at the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_replayssm.builders.destination import new_directory, require_free, write_json
from trtllm_replayssm.builders.quantize_config import quantisation_keys
from trtllm_replayssm.builders.quantize_plan import RECIPES, Job, Plan, make_plan
from trtllm_replayssm.builders.quantize_writer import SafetensorsWriter
from trtllm_replayssm.errors import CheckpointError, ConfigError
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.shards import INDEX, SINGLE

MAX_SHARD_BYTES = 5_000_000_000
_WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"))
_REWRITTEN = frozenset(("config.json", "hf_quant_config.json", INDEX))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """quantised: module (name in the files) -> new format; left: module -> why it stays although the recipe asks;
    source_bytes, written_bytes: of tensor data; files: names written with weights; copied: other files.
    """

    quantised: dict[str, MatrixFormat]
    left: dict[str, str]
    source_bytes: int
    written_bytes: int
    files: tuple[str, ...]
    copied: tuple[str, ...]


def quantize(
    src_dir: str | Path,
    dst_dir: str | Path,
    *,
    recipe: str = "dense",
    fp8: Sequence[str] = (),
    progress: Callable[[int, int, str], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> QuantizeReport:
    """Write the quantised form of the checkpoint `src_dir` to `dst_dir`, which must not exist or be empty.

    recipe: "experts" quantises routed experts, "dense" every linear layer of the main model as well. fp8: glob
    patterns of modules that become FP8 instead. The output head, embeddings, router, convolutions, vectors and the
    multi-token-prediction head always stay. progress(written bytes, all bytes, tensor name) is called after each step.

    Raises ConfigError for a bad setting and CheckpointError for a source that is damaged or quantised already.
    """
    src, dst = Path(src_dir), Path(dst_dir)
    if recipe not in RECIPES:
        raise ConfigError("quantize", "recipe", expected=f"one of {sorted(RECIPES)}", got=repr(recipe))
    require_free("quantize", dst)  # before the checkpoint is read
    with Checkpoint.open(src) as source:
        _check_unquantised(source)
        plan = make_plan(source, recipe, fp8)
        if not plan.modules():
            raise ConfigError("quantize", "recipe", expected=f"matrices of recipe {recipe!r} in the model", got="none")
        with new_directory("quantize", dst) as work:
            files = _write_weights(plan, work, max_shard_bytes, progress)
            _write_configs(source, plan, work)
            copied = _copy_others(src, work)
        return QuantizeReport(
            quantised={module.name: module.format for module in plan.modules()},
            left=plan.left,
            source_bytes=sum(tensor.nbytes for tensor in source.stored_tensors()),
            written_bytes=sum(entry.nbytes for job in plan.jobs for entry in job.entries()),
            files=files,
            copied=copied,
        )


def _check_unquantised(source: Checkpoint) -> None:
    if source.quantization is not None:
        got = f"{source.quantization.algorithm} in its configuration"
        raise CheckpointError("quantize", str(source.directory), expected="an unquantised checkpoint", got=got)
    for name in source.matrix_names():
        for storage in source.storage(name):
            if storage.format.quantised:
                weight = storage.weight.name
                raise CheckpointError(
                    "quantize", weight, expected="an unquantised checkpoint", got=storage.format.value
                )


def _shards(jobs: Sequence[Job], max_bytes: int) -> list[list[Job]]:
    shards: list[list[Job]] = [[]]
    used = 0
    for job in jobs:
        size = sum(entry.nbytes for entry in job.entries())
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(job)
        used += size
    return shards


def _write_weights(
    plan: Plan, work: Path, max_shard_bytes: int, progress: Callable[[int, int, str], None] | None
) -> tuple[str, ...]:
    shards = _shards(plan.jobs, max_shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    total = sum(entry.nbytes for job in plan.jobs for entry in job.entries())
    done = 0
    weight_map: dict[str, str] = {}
    for name, jobs in zip(names, shards, strict=True):
        entries = [entry for job in jobs for entry in job.entries()]
        weight_map.update({entry.name: name for entry in entries})
        writer = SafetensorsWriter(work / name, entries, {"format": "pt"})
        complete = False
        try:
            for job in jobs:
                job.run(writer.write)
                done += sum(entry.nbytes for entry in job.entries())
                if progress is not None:
                    progress(done, total, job.entries()[0].name)
            complete = True
        finally:
            writer.close(complete=complete)
    if count > 1:
        write_json(work / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return tuple(names)


def _write_configs(source: Checkpoint, plan: Plan, work: Path) -> None:
    quantised = {module.name: module.format for module in plan.modules()}
    copies = [job.copy for job in plan.jobs if job.copy is not None]
    others = [tensor.name.removesuffix(".weight") for tensor in copies if len(tensor.shape) > 1]
    in_config, in_file = quantisation_keys(quantised, others)
    # read as plain JSON, so that Infinity is written back in the spelling it came in
    config = json.loads((source.directory / "config.json").read_text(encoding="utf-8"))
    write_json(work / "config.json", {**config, "quantization_config": in_config})
    write_json(work / "hf_quant_config.json", in_file)


def _copy_others(src: Path, work: Path) -> tuple[str, ...]:
    """Tokenizer, generation settings, licence and other small files of the folder itself."""
    copied = []
    for path in sorted(src.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and path.name not in _REWRITTEN:
            shutil.copyfile(path, work / path.name)
            copied.append(path.name)
    return tuple(copied)
