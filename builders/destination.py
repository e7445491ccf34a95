"""A directory that appears complete or not at all: written beside its place, then renamed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import ConfigError


@contextmanager
def new_directory(operation: str, destination: Path) -> Iterator[Path]:
    """Yields a private folder to fill; when the block ends without an exception it takes the name `destination`.

    Raises ConfigError before any work when the rename at the end would be refused.
    """
    require_free(operation, destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = destination.parent / f".{destination.name}-{secrets.token_hex(8)}"  # named before it exists: ours to remove
    try:
        work.mkdir(mode=0o700)
        yield work
        work.chmod(0o755)  # private until complete
        work.rename(destination)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def require_free(operation: str, destination: Path) -> None:
    """Raise ConfigError where the rename would be refused, before the work: hours of it, for a large model."""
    found = None
    if destination.is_symlink():
        found = "a symbolic link, which cannot be replaced by a directory"
    elif destination.name in ("", ".."):
        found = "no name of its own"
    elif destination.exists():
        if not destination.is_dir() or any(destination.iterdir()):
            found = "one that is taken"
        elif os.path.samefile(destination, "."):
            found = "the current directory"
        elif os.path.ismount(destination):
            found = "a mount point"
    if found is not None:
        raise ConfigError(
            operation, f"destination {destination}", expected="a new or an empty directory", got=found,
            hint="Name a directory that does not exist yet",
        )  # fmt: skip


def write_json(path: Path, value: Any) -> None:
    """A JSON file of such a directory."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
