"""What the TensorRT session calls exists in the bindings of both flavours; nothing of it can run without a GPU."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

import tensorrt_rtx

from tests.builders.recorded_tensorrt import SIGNATURES

SESSION = Path(__file__).resolve().parents[2] / "runtime" / "session"
SOURCES = [SESSION / "tensorrt_engines.py", SESSION / "tensorrt_kernels.py"]
# member -> class, of everything that is called or read on an object of the library there
SHARED = {
    "deserialize_cuda_engine": "Runtime", "device_memory_size_v2": "ICudaEngine",
    "create_execution_context": "ICudaEngine", "set_optimization_profile_async": "IExecutionContext",
    "set_device_memory": "IExecutionContext", "set_input_shape": "IExecutionContext",
    "set_tensor_address": "IExecutionContext", "execute_async_v3": "IExecutionContext",
    "set_communicator": "IExecutionContext",
}  # fmt: skip
RTX_ONLY = {
    "create_runtime_config": "ICudaEngine", "set_execution_context_allocation_strategy": "IRuntimeConfig",
    "dynamic_shapes_kernel_specialization_strategy": "IRuntimeConfig", "create_runtime_cache": "IRuntimeConfig",
    "set_runtime_cache": "IRuntimeConfig", "cuda_graph_strategy": "IRuntimeConfig",
    "is_stream_capturable": "IExecutionContext", "serialize": "IRuntimeCache", "deserialize": "IRuntimeCache",
}  # fmt: skip
PLUGINS_ONLY = {"load_library": "IPluginRegistry"}
OURS_OR_TORCH = {
    "run", "programs", "values", "steps", "engine", "build", "flavour", "tensorrt_version", "cuda", "current_stream",
    "cuda_stream", "items", "shape", "is_contiguous", "stride", "data_ptr", "numel", "empty", "uint8", "read_bytes",
    "name", "append", "device", "type", "context", "shapes", "addresses", "profile", "get", "tell", "give_to", "save",
    "Size", "__init__", "__name__", "__version__", "getLogger", "warning", "is_file", "is_dir", "parent",
    "exists", "resolve", "is_relative_to", "replace", "write", "strerror",
}  # fmt: skip


def test_the_lists_above_are_all_that_the_session_uses() -> None:
    nodes = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text()))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names = {n for n in attributes if not n.startswith("_") or n.startswith("__")} - OURS_OR_TORCH
    modules = {"Runtime", "ILogger", "ExecutionContextAllocationStrategy", "USER_MANAGED", "get_plugin_registry",
               "DynamicShapesKernelSpecializationStrategy", "EAGER", "CudaGraphStrategy", "DISABLED"}  # fmt: skip
    assert names == SHARED.keys() | RTX_ONLY.keys() | PLUGINS_ONLY.keys() | modules


def test_rtx_has_them() -> None:
    for member, owner in {**SHARED, **RTX_ONLY}.items():
        assert hasattr(getattr(tensorrt_rtx, owner), member), (owner, member)
    assert tensorrt_rtx.DynamicShapesKernelSpecializationStrategy.EAGER
    assert tensorrt_rtx.ExecutionContextAllocationStrategy.USER_MANAGED
    assert tensorrt_rtx.CudaGraphStrategy.DISABLED


def test_the_recorded_full_bindings_have_them() -> None:
    data = json.loads(SIGNATURES.read_text())
    for member, owner in {**SHARED, **PLUGINS_ONLY}.items():
        known = data["classes"][owner]
        assert member in known["methods"] or member in known["attributes"], (owner, member)
    assert "USER_MANAGED" in data["enums"]["ExecutionContextAllocationStrategy"]
    assert "get_plugin_registry" in data["functions"]
