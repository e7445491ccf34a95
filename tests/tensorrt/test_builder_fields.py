"""Plugins that the builder asks for, created by the real library through TensorRT's real registry, on a CPU.

Needs the lean runtime's Python package (`tensorrt_lean`, or its bindings beside its libraries) and the plugin library
in REPLAYSSM_PLUGIN_LIBRARY; skipped elsewhere. The fields are those of builds over the stand-in for the full library.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import trace_networks
from trtllm_replayssm.bindings import MOE, ROUTE
from trtllm_replayssm.builders.flavour import FlavourName
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import HollowParameters
from trtllm_replayssm.builders.plugin_fields import NAMESPACE, REAL_FIELDS, VERSION
from trtllm_replayssm.builders.random_weights import RandomParameters
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.weights.presets import preset_geometry, slice_geometry

LIBRARY = os.environ.get("REPLAYSSM_PLUGIN_LIBRARY")
PERIODS = {"nemotron-3-super-120b-a12b-nvfp4": (6, 8), "qwen3.5-122b-a10b-nvfp4": (0, 3)}


@pytest.fixture(scope="module")
def lean() -> Any:
    if LIBRARY is None or not Path(LIBRARY).is_file():
        pytest.skip("needs REPLAYSSM_PLUGIN_LIBRARY, the plugin library")
    for name in ("tensorrt_lean", "tensorrt_lean_bindings"):
        try:
            module = import_module(name)
        except ImportError:
            continue
        module.get_plugin_registry().load_library(LIBRARY)
        return module
    pytest.skip("needs tensorrt_lean")


@pytest.mark.parametrize("read", [None, StateFormat.NVFP4])
@pytest.mark.parametrize("preset", PERIODS)
def test_the_library_creates_every_plugin_from_the_builders_fields(
    preset: str, read: StateFormat | None, lean: Any
) -> None:
    geometry = slice_geometry(preset_geometry(preset), PERIODS[preset], mtp=False)
    replay = ReplayConfig(window=16, max_step_tokens=4, read=read)
    options = BuildOptions(flavour=FlavourName.TENSORRT, replay=replay, max_batch=64)
    traced = trace_networks(HollowParameters(RandomParameters(geometry, preset)), options)
    (calls,) = traced.calls.values()
    assert len(calls) >= 3
    registry, created = lean.get_plugin_registry(), set()
    for call in calls:
        creator = registry.get_creator(call.plugin.name, VERSION, NAMESPACE)
        assert creator is not None, call.plugin.name
        assert make(lean, creator, call.plugin.fields) is not None, call.plugin
        wrong = {**call.plugin.fields, "top_k" if call.plugin.name == ROUTE else "activation": 99}
        assert make(lean, creator, wrong) is None
        created.add(call.plugin.name)
    assert {MOE, ROUTE} <= created and len(created) >= 4


def make(lean: Any, creator: Any, fields: dict[str, Any]) -> Any:
    """The plugin of some fields, None where the library refuses them."""
    kinds = {np.int32: lean.PluginFieldType.INT32, np.float32: lean.PluginFieldType.FLOAT32}
    types = {name: np.float32 if name in REAL_FIELDS else np.int32 for name in fields}
    values = {name: np.array([value], dtype=types[name]) for name, value in fields.items()}
    collection = lean.PluginFieldCollection(
        [lean.PluginField(name, value, kinds[types[name]]) for name, value in values.items()]
    )
    try:
        return creator.create_plugin("test", collection, lean.TensorRTPhase.BUILD)
    except RuntimeError:
        return None
