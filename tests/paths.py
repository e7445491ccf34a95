"""Where tests find checkpoints: the bundled examples, and the optional BF16 originals they were made from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
VARIABLE = "REPLAYSSM_MODELS"


def models_dir() -> Path | None:
    """The directory of the originals: $REPLAYSSM_MODELS, else `shared/models` beside the checkout; None when absent."""
    path = Path(os.environ.get(VARIABLE) or ROOT.parent / "shared" / "models")
    return path if path.is_dir() else None


def find_model(name: str) -> Path | None:
    """The directory of one original; None when it is not there."""
    directory = models_dir()
    return None if directory is None or not (directory / name / "config.json").exists() else directory / name


def require_model(name: str) -> Path:
    """The directory of one original; skips the test when it is not there."""
    found = find_model(name)
    if found is None:
        pytest.skip(f"needs the BF16 original {name}: set {VARIABLE} to a directory that holds it")
    return found
