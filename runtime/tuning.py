"""The file of tuned windows: `trtllm-replayssm tune` writes it, an engine without explicit replay settings reads it.

It is read only where the environment variable REPLAYSSM_TUNE names it: a window never changes silently.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.shapes import SsmShape

VARIABLE = "REPLAYSSM_TUNE"
VERSION = 1


def tune_key(shape: SsmShape, config: ReplayConfig, gpu: str) -> str:
    """What an entry is valid for, but the batch: layer shape, T, formats, GPU (its name, or "cpu")."""
    read = "" if config.read is None else f" read {config.read.value}"
    sizes = f"H{shape.heads} G{shape.groups} P{shape.head_dim} N{shape.state_dim}"
    return f"{shape.kind.value} {sizes}, T {config.max_step_tokens}, {config.recurrence.value}{read}, {gpu}"


def read_tune_file(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Entries by key; empty when there is no file. Raises ConfigError for a file that is not ours."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = data["entries"]
        known = data["version"] == VERSION and all(
            isinstance(e["window"], int) and isinstance(e["batch"], int) for found in entries.values() for e in found
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise ConfigError(
            "tune", str(path), expected=f"a tune file of version {VERSION}", got="another file",
            hint="Delete it and run trtllm-replayssm tune again",
        )  # fmt: skip
    return dict(entries)


def add_entry(path: Path, key: str, entry: Mapping[str, Any]) -> None:
    """Add an entry, in place of one of the same batch. entry: window, batch, accepted and anything that explains it."""
    entries = read_tune_file(path)
    kept = [e for e in entries.get(key, []) if e["batch"] != entry["batch"]]
    entries[key] = sorted([*kept, dict(entry)], key=lambda e: e["batch"])
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"version": VERSION, "entries": entries}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def with_tuned_window(config: ReplayConfig, shape: SsmShape, gpu: str, batch: int) -> ReplayConfig:
    """The settings with the window of the entry of the closest batch; unchanged without a file or an entry."""
    name = os.environ.get(VARIABLE)
    if not name:
        return config
    found = read_tune_file(Path(name)).get(tune_key(shape, config, gpu), [])
    if not found:
        return config
    closest = min(found, key=lambda e: abs(math.log(e["batch"] / batch)))
    return replace(config, window=closest["window"])
