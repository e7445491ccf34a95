"""The recorded bindings of the full `tensorrt` against real ones of the same version: those of the lean runtime.

The lean package binds what loads and runs engines and what creates plugins, not what builds. It imports on a CPU.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("tensorrt_lean", reason="needs the wheels of tensorrt-lean-cu13: requirements/tensorrt-lean-11.txt")
pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

import tensorrt_lean

from tests.builders.recorded_tensorrt import SIGNATURES
from tests.tools.record_signatures import offered

SHARED = {"ICudaEngine", "IExecutionContext", "IPluginRegistry", "PluginField", "Runtime", "IProgressMonitor"}


def test_what_the_lean_runtime_offers_is_recorded_with_the_same_signatures() -> None:
    recorded = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    if tensorrt_lean.__version__ != recorded["version"]:
        pytest.skip(f"recorded: {recorded['version']}, tensorrt_lean: {tensorrt_lean.__version__}")
    classes, enums = offered(tensorrt_lean)
    assert classes.keys() >= SHARED
    for name, members in classes.items():
        assert plain(members) == plain(recorded["classes"][name]), name
    assert len(enums) > 5
    for name, values in enums.items():
        assert values == recorded["enums"][name], name


def plain(members: dict[str, Any]) -> Any:
    """With the Python name of a type that the bindings print by its C++ name, for want of one when they were made."""
    return json.loads(re.sub(r"nvinfer1::(IEngine)?", lambda found: "Engine" if found[1] else "", json.dumps(members)))
