"""Packaging: metadata, the package map and the extras. Tool settings live in pyproject.toml.

The root folders `builders/` and `runtime/` install as `trtllm_replayssm.builders` and `trtllm_replayssm.runtime`.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = "trtllm_replayssm"
ROOMS = ("builders", "runtime")  # root folders that are sub-packages of PACKAGE

TEST = ["hypothesis>=6.100", "mypy>=1.11", "pytest>=8.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "ruff>=0.6"]
SERVE = ["fastapi>=0.115", "uvicorn>=0.30"]


def version() -> str:
    """The version string of `trtllm_replayssm/_version.py`, read as text: importing needs the dependencies."""
    text = (ROOT / PACKAGE / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"setup: {PACKAGE}/_version.py: expected a line __version__ = \"X.Y.Z\", got none")
    return match.group(1)


def package_dirs() -> dict[str, str]:
    """Every importable package and its folder.

    Listed one by one because an editable install maps exactly the packages named here: a sub-package that is only
    reachable through its parent's folder would be missing for the rooms, whose folder is not inside PACKAGE's.
    """
    dirs = {PACKAGE: PACKAGE}
    for folder in (PACKAGE, *ROOMS):
        name = folder if folder == PACKAGE else f"{PACKAGE}.{folder}"
        dirs[name] = folder
        for sub in find_namespace_packages(where=str(ROOT / folder)):
            if "__pycache__" not in sub and list((ROOT / folder / sub.replace(".", "/")).glob("*.py")):
                dirs[f"{name}.{sub}"] = f"{folder}/{sub.replace('.', '/')}"
    return dirs


PACKAGES = package_dirs()

setup(
    name="trtllm-replayssm",
    version=version(),
    packages=sorted(PACKAGES),
    package_dir=PACKAGES,
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2", "rich"],
    entry_points={"console_scripts": ["trtllm-replayssm = trtllm_replayssm.cli:main"]},
)
