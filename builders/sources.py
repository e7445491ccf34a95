"""Where the parameters of a build come from, as a user names it: a checkpoint, or a preset with random ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.options import AS_STORED, DENSE_NVFP4, DEQUANTISED, BuildOptions
from trtllm_replayssm.builders.parameters import CheckpointParameters, Parameters
from trtllm_replayssm.builders.quantised_parameters import DenseNvfp4Parameters
from trtllm_replayssm.builders.random_weights import RandomParameters
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.presets import preset_config, preset_geometry, slice_geometry


@dataclass(frozen=True, slots=True)
class Source:
    """parameters: in the formats of the build; config: the model's config.json; tokenizer: folder with its files."""

    parameters: Parameters
    config: dict[str, Any]
    tokenizer: Path | None


@contextmanager
def checkpoint_source(directory: str | Path, options: BuildOptions, *, mtp: bool = True) -> Iterator[Source]:
    """A checkpoint on disk, open while the block runs; mtp=False leaves its drafting head out."""
    with Checkpoint.open(directory) as checkpoint:
        config = json.loads((checkpoint.directory / "config.json").read_text(encoding="utf-8"))
        parameters: Parameters = CheckpointParameters(checkpoint, dequantised=options.weights == DEQUANTISED)
        if not mtp:
            parameters.geometry = replace(parameters.geometry, mtp_pattern=())
        yield Source(_settled(parameters, options), config, checkpoint.directory)


def random_source(
    preset: str, options: BuildOptions, *, layers: tuple[int, int] | None = None, mtp: bool = True
) -> Source:
    """Random parameters of a public geometry, in the formats of its checkpoint; layers: first and last one to keep."""
    if options.weights == DEQUANTISED:
        raise UnsupportedError(
            "build", "weights", expected=f"{AS_STORED} or {DENSE_NVFP4} with random weights", got=options.weights,
            hint="Random weights have the formats of the public checkpoint",
        )  # fmt: skip
    geometry = slice_geometry(preset_geometry(preset), layers, mtp=mtp)
    first = 0 if layers is None else layers[0]
    parameters = RandomParameters(geometry, geometry.name, first_layer=first)
    return Source(_settled(parameters, options), preset_config(preset), None)


def _settled(parameters: Parameters, options: BuildOptions) -> Parameters:
    return DenseNvfp4Parameters(parameters) if options.weights == DENSE_NVFP4 else parameters
