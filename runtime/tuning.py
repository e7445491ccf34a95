"""The file of tuned windows and launches: `trtllm-replayssm tune` writes it, an engine without explicit replay settings
reads it.

It is read only where the environment variable REPLAYSSM_TUNE names it: neither ever changes silently.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, cast

from trtllm_replayssm.checks import require_positive
from trtllm_replayssm.config import MAX_WINDOW, ReplayConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.launches import LARGEST, TunedLaunch, UpdateLaunch
from trtllm_replayssm.shapes import SsmShape
from trtllm_replayssm.whole_file import changed_by_one, whole_file

_LOG = logging.getLogger(__name__)
VARIABLE = "REPLAYSSM_TUNE"
VERSION = 2


class TuneEntry(TypedDict):
    """What an engine reads of an entry. launch: an entry of `UpdateLaunch`, None: the library's choice."""

    batch: int
    window: int
    launch: dict[str, Any] | None


def tune_key(shape: SsmShape, config: ReplayConfig, gpu: str) -> str:
    """What an entry is valid for, but the batch: layer shape, T, formats, GPU (its name, or "cpu")."""
    read = "" if config.read is None else f" read {config.read.value}"
    sizes = f"H{shape.heads} G{shape.groups} P{shape.head_dim} N{shape.state_dim}"
    return f"{shape.kind.value} {sizes}, T {config.max_step_tokens}, {config.recurrence.value}{read}, {gpu}"


def read_tune_file(path: Path) -> dict[str, list[TuneEntry]]:
    """Entries by key; empty when there is no file. Raises ConfigError for a file of another version or kind.

    Entries may have more than `TuneEntry` says: what explains them.
    """
    if not path.exists():
        return {}
    version: object = None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version, entries = data["version"], data["entries"]
        known = version == VERSION
        for entry in (e for found in entries.values() for e in found if known):
            require_positive("tune", "window", entry["window"], most=MAX_WINDOW)
            require_positive("tune", "batch", entry["batch"], most=LARGEST)
            if entry["launch"] is not None:
                UpdateLaunch.of_entry(entry["launch"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError):
        known = False
    if not known:
        got = f"version {version}" if isinstance(version, int) and version != VERSION else "another file"
        raise ConfigError(
            "tune", str(path), expected=f"a tune file of version {VERSION}", got=got,
            hint="Delete it and run trtllm-replayssm tune again",
        )  # fmt: skip
    return dict(entries)


def add_entry(path: Path, key: str, entry: Mapping[str, Any]) -> None:
    """Add an entry, in place of one of the same batch. entry: batch, window, launch and anything that explains them.

    Several runs may add to one file at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with changed_by_one(path):
        entries = read_tune_file(path)
        kept = [e for e in entries.get(key, []) if e["batch"] != entry["batch"]]
        entries[key] = sorted([*kept, cast(TuneEntry, dict(entry))], key=lambda e: e["batch"])
        with whole_file(path) as file:
            file.write(json.dumps({"version": VERSION, "entries": entries}, indent=1).encode() + b"\n")


def with_tuned(config: ReplayConfig, shape: SsmShape, gpu: str, batch: int) -> ReplayConfig:
    """The settings with the window of the entry of the closest batch, and with the launches measured at that window.

    A launch serves steps of exactly the batch it was measured at. Unchanged without a file or an entry.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return config
    found = read_tune_file(Path(name)).get(tune_key(shape, config, gpu), [])
    if not found:
        return config
    window = min(found, key=lambda e: abs(math.log(e["batch"] / batch)))["window"]
    launches = tuple(
        TunedLaunch(rows=e["batch"], tokens=config.max_step_tokens, launch=UpdateLaunch.of_entry(e["launch"]))
        for e in found
        if e["window"] == window and e["launch"] is not None
    )
    _LOG.info("recurrent state: window %d, as the tune file %s says", window, name)
    return replace(config, window=window, launches=launches)
