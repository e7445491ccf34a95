"""Small C++ programs over the plain headers of `plugins/`, built for the host by tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.contract.rooms import ROOT


def built(folder: Path, source: str, includes: Sequence[Path] = ()) -> Path:
    """The program of a C++17 source in `folder`, by g++ without a warning; `plugins/` is among its includes.
    Skips the test where there is no g++.
    """
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    file, binary = folder / "program.cpp", folder / "program"
    file.write_text(source)
    folders = [f"-I{path}" for path in (ROOT / "plugins", *includes)]
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Werror", *folders, str(file), "-o", str(binary)], check=True)
    return binary
