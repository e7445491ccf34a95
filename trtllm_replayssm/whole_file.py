"""Files that appear whole or not at all, also where several processes write one, files that grow beside the one before,
and a lock between processes."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trtllm_replayssm.errors import ConfigError


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yields a file to fill, under a name that nobody else uses; when the block ends it is on the disk and takes the
    place of `path`, or of what a link of that name points to. After an exception `path` is as before. mode:
    permissions, less those that the umask denies. Raises OSError, and ConfigError for what is no file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise ConfigError("write file", str(path), expected="a file, or nothing yet", got="a device, pipe or folder")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextmanager
def growing_file(path: Path) -> Iterator[IO[str]]:
    """Yields a text file for results that come one by one, of the name `path` and `.partial`; when the block ends it
    takes the place of `path`. After an exception, or when the process is killed, `path` is as before, and what was
    written stays in the other. A device or pipe is written to itself. Raises OSError.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    beside = path.with_name(path.name + ".partial")
    try:
        with beside.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        if beside.exists() and beside.stat().st_size == 0:
            beside.unlink()
        raise


@contextmanager
def changed_by_one(path: Path) -> Iterator[None]:
    """One process, or thread, at a time is inside for a `path`: one that reads it, changes it and writes it as a whole.

    The lock is a file beside it, which stays: `path` itself is replaced, and with it a lock on it. A link and what it
    points to are one `path`.
    """
    path = Path(os.path.realpath(path))
    with path.with_name(f".{path.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when the file is closed, also by a process that is killed
        yield
