"""Finding and loading the native library of CUDA kernels.

Looked for in this order: the file named by the environment variable REPLAYSSM_NATIVE_LIBRARY, the installed package
(trtllm_replayssm/native/), a build in the checkout (build/native/, made by the cmake command in docs/kernels.md).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.ops._abi import Library

VARIABLE = "REPLAYSSM_NATIVE_LIBRARY"
FILE_NAME = "libreplayssm.so"
_PACKAGE = Path(__file__).resolve().parents[1]


def candidates() -> list[Path]:
    """Where the library may be, best first; a path from the environment stands alone."""
    named = os.environ.get(VARIABLE)
    if named:
        return [Path(named)]
    return [_PACKAGE / "native" / FILE_NAME, _PACKAGE.parent / "build" / "native" / FILE_NAME]


def find_library() -> Path | None:
    """The library's file, or None. Raises ConfigError when the environment names a file that is not there."""
    found = next((path for path in candidates() if path.is_file()), None)
    named = os.environ.get(VARIABLE)
    if named and found is None:
        raise ConfigError("find native library", VARIABLE, expected=f"the path of a {FILE_NAME}", got=repr(named))
    return found


@cache
def load_library(path: Path) -> Library:
    """The library at `path`, loaded once a process. Raises EngineMismatchError for another ABI version, ConfigError for
    a file that cannot be loaded.
    """
    try:
        return Library(path)
    except OSError as error:
        raise ConfigError("load native library", str(path), expected="a loadable library", got=error) from error


def installed_library() -> Library:
    """The library that the custom operations call. Raises ConfigError when there is none."""
    path = find_library()
    if path is None:
        places = ", ".join(str(p) for p in candidates())
        raise ConfigError(
            "load native library", FILE_NAME, expected=f"one of {places}", got="none of them",
            hint="Build it as docs/kernels.md says, or set REPLAYSSM_NATIVE_LIBRARY",
        )  # fmt: skip
    return load_library(path)
