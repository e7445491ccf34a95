"""A directory that appears complete or not at all: written beside its place, then renamed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtllm_replayssm.errors import ConfigError


@contextmanager
def new_directory(operation: str, destination: Path) -> Iterator[Path]:
    """Yields a private folder to fill; when the block ends without an exception it takes the name `destination`.

    Raises ConfigError before any work when the rename at the end would be refused.
    """
    _require_free(operation, destination)
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


def _require_free(operation: str, destination: Path) -> None:
    found = None
    if destination.is_symlink():
        found = "a symbolic link"
    elif destination.name in ("", ".."):
        found = "no name of its own"
    elif destination.exists():
        if not destination.is_dir() or any(destination.iterdir()):
            found = "one that is taken"
        elif os.path.samefile(destination, ".") or os.path.ismount(destination):
            found = "a directory that cannot be replaced"
    if found is not None:
        raise ConfigError(
            operation, f"destination {destination}", expected="a new or an empty directory", got=found,
            hint="Name a directory that does not exist yet",
        )  # fmt: skip
