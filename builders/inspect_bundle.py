"""What a bundle holds, from its manifest and build record alone: no GPU and no TensorRT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_replayssm.bindings import EngineStep, OpStep
from trtllm_replayssm.builders.build import BUILD_LOG
from trtllm_replayssm.builders.build_log import EngineRecord, quantised_layers
from trtllm_replayssm.bundle_parts import bundle_parts
from trtllm_replayssm.errors import EngineMismatchError
from trtllm_replayssm.manifest import Manifest, check_files, from_json, read_manifest, to_json


def read_records(directory: Path) -> tuple[EngineRecord, ...]:
    """The build record. Raises EngineMismatchError naming the first key that does not fit."""
    try:
        value = json.loads((directory / BUILD_LOG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineMismatchError(
            "read bundle", BUILD_LOG, expected="a readable record", got=str(error)[:200], hint="Build the bundle again"
        ) from None
    records: tuple[EngineRecord, ...] = from_json(tuple[EngineRecord, ...], value, BUILD_LOG)
    return records


def summarise_parts(directory: Path) -> list[dict[str, Any]]:
    """`summarise_bundle` of every rank that is there, in order; one where a GPU has the whole model."""
    return [summarise_bundle(part) for part in bundle_parts(directory)]


def summarise_bundle(directory: Path) -> dict[str, Any]:
    """A JSON report of one rank. Raises EngineMismatchError, naming it, at the first difference of manifest and files.
    """
    manifest = read_manifest(directory)
    check_files(directory, manifest)
    records = read_records(directory)
    return {
        "name": manifest.geometry.name,
        "build": to_json(manifest.build),
        "replay": to_json(manifest.replay),
        "layers": [kind.value for kind in manifest.geometry.layers],
        "mtp_layers": [kind.value for kind in manifest.geometry.mtp_pattern],
        "profiles": {name: to_json(profile) for name, profile in manifest.profiles.items()},
        "programs": {name: _steps(manifest, name) for name in manifest.programs},
        "bindings": {name: _bindings(manifest, name) for name in manifest.programs},
        "outputs": {name: _outputs(manifest, name) for name in manifest.programs},
        "matmuls": _matmuls(manifest, records),
        "memory": {
            "engine_bytes": sum(record.bytes for record in records),
            "largest_engine_bytes": max(record.bytes for record in records),
            "scratch_bytes": {
                name: max((m.shared[i] for m in manifest.memory.values() if i < len(m.shared)), default=0)
                for i, name in enumerate(manifest.profiles)
            },
            "weights_beside_bytes": sum(p.stat().st_size for p in (directory / "weights").glob("*")),
            "build_peak_rss_bytes": manifest.build.peak_rss_bytes,
        },
    }


def _steps(manifest: Manifest, name: str) -> dict[str, int]:
    steps = manifest.programs[name].steps
    counts = {"engines": sum(isinstance(step, EngineStep) for step in steps)}
    for step in steps:
        if isinstance(step, OpStep):
            counts[step.op] = counts.get(step.op, 0) + 1
    return counts


def _bindings(manifest: Manifest, name: str) -> dict[str, str]:
    """What comes from outside: tensors that no step of the program writes."""
    program = manifest.programs[name]
    written = {tensor for step in program.steps for tensor in step.outputs.values()}
    return {
        tensor: f"{spec.dtype} {list(spec.dims)}"
        for tensor, spec in program.tensors.items()
        if tensor not in written
    }


def _outputs(manifest: Manifest, name: str) -> dict[str, str]:
    program = manifest.programs[name]
    specs = {output: program.tensors[tensor] for output, tensor in program.outputs.items()}
    return {output: f"{spec.dtype} {list(spec.dims)}" for output, spec in specs.items()}


def _matmuls(manifest: Manifest, records: tuple[EngineRecord, ...]) -> dict[str, Any]:
    """Network layers with quantised weights, and those of them that really run so, by profile."""
    return {
        "quantised_weights": {name: fmt.value for r in records for name, fmt in r.quantised.items()},
        "running": {
            profile: {name: fmt.value for r in records for name, fmt in quantised_layers(r, i).items()}
            for i, profile in enumerate(manifest.profiles)
        },
    }
