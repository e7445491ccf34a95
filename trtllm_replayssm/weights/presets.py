"""The geometries of the four public checkpoints, from the copies of their config.json in `presets/`."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.hf_config import parse_config

_SUFFIX = "-nvfp4"  # a geometry does not depend on how its weights are stored
_NAMES = ("nemotron-3-nano-4b", "nemotron-3-super-120b-a12b-nvfp4", "qwen3.5-4b", "qwen3.5-122b-a10b-nvfp4")


def preset_names() -> tuple[str, ...]:
    """The names of all presets."""
    return _NAMES


def preset_config(name: str) -> dict[str, Any]:
    """The config.json content of a preset; upper case and a missing `-nvfp4` are accepted in `name`."""
    found = _find(name)
    text = (files("trtllm_replayssm") / "presets" / f"{found}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def preset_geometry(name: str) -> ModelGeometry:
    """The geometry of a preset; ConfigError lists the names when there is no such preset."""
    return parse_config(preset_config(name), name=_find(name))


def slice_geometry(
    geometry: ModelGeometry, layers: tuple[int, int] | None, *, mtp: bool, operation: str = "build"
) -> ModelGeometry:
    """A geometry with some of its layers, both ends kept, and without the drafting head unless `mtp`.

    Raises ConfigError of `operation` for layers that are not there.
    """
    if layers is not None:
        first, last = layers
        if not 0 <= first <= last < len(geometry.layers):
            raise ConfigError(
                operation, "layers", expected=f"FIRST-LAST within 0-{len(geometry.layers) - 1}", got=f"{first}-{last}"
            )
        geometry = replace(geometry, layers=geometry.layers[first : last + 1])
    return geometry if mtp else replace(geometry, mtp_pattern=())


def _find(name: str) -> str:
    wanted = name.lower().removesuffix(_SUFFIX)
    for known in _NAMES:
        if wanted == known.removesuffix(_SUFFIX):
            return known
    raise ConfigError(
        "preset_geometry", "name", expected=f"one of {list(_NAMES)}", got=repr(name),
        hint="Where a command takes a checkpoint too, no directory of this name exists",
    )  # fmt: skip
