"""States of a stopped run on disk: each row's snapshot after a measured length, so that hours are not decoded twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_replayssm.runtime.session.base import RawArray, SlotSnapshot
from trtllm_replayssm.whole_file import whole_file


@dataclass(frozen=True)
class SavedRun:
    """position: tokens that each row has absorbed, the prompt included; rows: `SlotSnapshot.arrays` of each."""

    position: int
    rows: tuple[dict[str, RawArray], ...]


def save_run(path: Path, snapshots: Sequence[SlotSnapshot]) -> None:
    """Write the snapshots of all rows, whole or not at all, in place of the last ones."""
    rows: list[dict[str, Any]] = []
    for snapshot in snapshots:
        named = {}
        for name, (kind, shape, data) in snapshot.arrays().items():
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            named[name] = [kind, list(shape), flat]
        rows.append(named)
    with whole_file(path) as file:
        torch.save({"position": snapshots[0].position, "rows": rows}, file)


def load_run(path: Path) -> SavedRun | None:
    """What `save_run` wrote, None when there is nothing."""
    if not path.exists():
        return None
    data = torch.load(path, weights_only=True)
    rows = tuple(
        {name: (kind, tuple(shape), flat.numpy().tobytes()) for name, (kind, shape, flat) in row.items()}
        for row in data["rows"]
    )
    return SavedRun(data["position"], rows)
