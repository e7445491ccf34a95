"""A journal of finished measurements, one JSON object a line: an evaluation that was stopped goes on behind it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import ConfigError


class Journal:
    """The first line says what is evaluated; each further line is a measurement."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Open or begin a journal. Raises ConfigError for one of another evaluation, naming the first difference."""
        self._path = path
        self.rows: list[dict[str, Any]] = []
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(header)
            return
        text = path.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]
        if complete != text:  # the line that was being written when the process ended
            os.truncate(path, len(complete.encode()))
        lines = [json.loads(line) for line in complete.splitlines()]
        known = json.loads(json.dumps(header))
        for key in known:
            found = lines[0].get(key) if lines else None
            if found != known[key]:
                raise ConfigError(
                    "eval", f"journal {path}", expected=f"{key} {known[key]!r}", got=repr(found),
                    hint="Give another --work folder, or delete this one",
                )  # fmt: skip
        self.rows = lines[1:]

    def append(self, row: dict[str, Any]) -> None:
        """Add a measurement; it is on the disk when this returns."""
        self._write(row)
        self.rows.append(row)

    def find(self, **keys: Any) -> dict[str, Any] | None:
        """The first measurement with these values."""
        return next((r for r in self.rows if all(r.get(k) == v for k, v in keys.items())), None)

    def _write(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
            lines.flush()
