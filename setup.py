"""Packaging: metadata, the package map and the extras. Tool settings live in pyproject.toml.

The root folders `builders/` and `runtime/` install as `trtllm_replayssm.builders` and `trtllm_replayssm.runtime`.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = "trtllm_replayssm"
ROOMS = ("builders", "runtime")  # root folders that are sub-packages of PACKAGE

SERVE = ["fastapi>=0.115", "prometheus-client>=0.20", "pydantic>=2.8", "pyyaml>=6", "uvicorn>=0.30"]
# Not in "test": Ray gives its own proxy a fixed minute to start, which two busy cores do not always keep.
RAY = ["ray[serve]>=2.40; python_version < '3.14'"]
FIGURES = ["matplotlib>=3.8"]
EXTRAS = {
    "test": [
        "hypothesis>=6.100", "mypy>=1.15", "pytest>=8.2", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "ruff>=0.9",
        *SERVE, "httpx>=0.27", "openai>=1.68", "schemathesis>=4.0", *FIGURES,
    ],
    "reference": ["transformers>=5.17,<5.18"],  # tests/tools and the tests of its checkpoints only
    "serve": SERVE,
    "ray": RAY,  # examples/ray_serve: data-parallel replicas
    "guided": ["xgrammar>=0.1.20"],  # response_format of the server
    "eval": FIGURES,  # figures of `trtllm-replayssm eval plot`
    "tensorrt": ["tensorrt>=11.0"],
    "tensorrt-rtx": ["tensorrt-rtx>=1.7"],
}


def version() -> str:
    """The version in `_version.py`, read as text: importing the package would need its dependencies."""
    text = (ROOT / PACKAGE / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f'setup: {PACKAGE}/_version.py: expected a line __version__ = "X.Y.Z", got none')
    return match.group(1)


def package_dirs() -> dict[str, str]:
    """Every package by its import name, with its folder relative to the root."""
    dirs = {PACKAGE: PACKAGE, **{f"{PACKAGE}.{room}": room for room in ROOMS}}
    for name, folder in tuple(dirs.items()):
        for sub in find_packages(where=str(ROOT / folder)):
            dirs[f"{name}.{sub}"] = f"{folder}/{sub.replace('.', '/')}"
    return dirs


PACKAGES = package_dirs()

setup(
    name="trtllm-replayssm",
    version=version(),
    description="ReplaySSM decoding for hybrid state-space language models: runtime, server, replay kernels",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=sorted(PACKAGES),
    package_dir=PACKAGES,
    package_data={
        PACKAGE: ["py.typed", "presets/*.json", "native/*.so"],  # the library where it was installed before packaging
        f"{PACKAGE}.bench": ["*.inc"],
        f"{PACKAGE}.runtime.server": ["*.html"],
    },
    python_requires=">=3.10",
    install_requires=[
        "jinja2>=3.1", "ml_dtypes>=0.5", "numpy>=1.26", "rich>=13",
        "safetensors>=0.6.2", "tokenizers>=0.20", "torch>=2.6",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["trtllm-replayssm = trtllm_replayssm.cli:main"]},
)
