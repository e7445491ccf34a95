"""The geometries of the four public checkpoints, from the copies of their config.json in `presets/`."""

from __future__ import annotations

import json
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


def _find(name: str) -> str:
    wanted = name.lower().removesuffix(_SUFFIX)
    for known in _NAMES:
        if wanted == known.removesuffix(_SUFFIX):
            return known
    raise ConfigError("preset_geometry", "name", expected=f"one of {list(_NAMES)}", got=repr(name))
