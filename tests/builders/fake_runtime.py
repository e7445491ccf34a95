"""A stand-in for TensorRT's runtime on a CPU: takes addresses and shapes as the library does, evaluates the network.

It refuses what the library would: a shape outside the profile, an input without shape, a binding without address, an
engine file that nobody built. It keeps a journal of what contexts are told and of what is enqueued. No test here.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_rtx
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from tests.builders.bundles import Traced, definition_of
from tests.builders.evaluator import NetworkEvaluator
from tests.builders.recording import Event
from trtllm_replayssm.builders.profiles import shape_range
from trtllm_replayssm.builders.segments import Segment
from trtllm_replayssm.manifest import Manifest

TORCH_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32}


class FakeTensorRt:
    """The module, for one bundle and the networks that it was built from."""

    __name__ = "tensorrt_rtx"
    __spec__ = None
    ILogger = tensorrt_rtx.ILogger
    ExecutionContextAllocationStrategy = tensorrt_rtx.ExecutionContextAllocationStrategy
    DynamicShapesKernelSpecializationStrategy = tensorrt_rtx.DynamicShapesKernelSpecializationStrategy
    CudaGraphStrategy = tensorrt_rtx.CudaGraphStrategy

    def __init__(self, bundle: Path, manifest: Manifest, traced: Traced, version: str | None = None) -> None:
        self.__version__ = version or manifest.build.tensorrt_version
        self.executed: list[tuple[str, int]] = []
        self.journal: list[Event] = []
        self.capturable = True  # what contexts answer
        self.caches: list[FakeCache] = []
        self._engines = {}
        for name, segment in traced.segments.items():
            digest = hashlib.sha256((bundle / f"segments/{name}.engine").read_bytes()).digest()
            self._engines[digest] = _Engine(self, name, segment, manifest)

    def Runtime(self, logger: Any) -> FakeTensorRt:
        assert isinstance(logger, self.ILogger)
        return self

    def deserialize_cuda_engine(self, data: bytes) -> _Engine | None:
        return self._engines.get(hashlib.sha256(data).digest())


class FakeCache:
    """Of compiled kernels; takes only what it has written."""

    CONTENT = b"kernels for this GPU"

    def __init__(self) -> None:
        self.loaded: bool | None = None

    def deserialize(self, data: bytes) -> bool:
        self.loaded = data == self.CONTENT
        return self.loaded

    def serialize(self) -> bytes:
        return self.CONTENT


class _Config:
    dynamic_shapes_kernel_specialization_strategy: Any = None
    cuda_graph_strategy: Any = None
    cache: FakeCache | None = None

    def __init__(self, library: FakeTensorRt) -> None:
        self._library = library

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> FakeCache:
        self._library.caches.append(FakeCache())
        return self._library.caches[-1]

    def set_runtime_cache(self, cache: FakeCache) -> bool:
        self.cache = cache
        return True


class _Engine:
    device_memory_size_v2 = 1024

    def __init__(self, library: FakeTensorRt, name: str, segment: Segment, manifest: Manifest) -> None:
        self.runtime, self.name, self.segment, self.manifest = library, name, segment, manifest
        self.evaluator = NetworkEvaluator(tensorrt_rtx, definition_of(segment), segment.network.constants)

    def create_runtime_config(self) -> _Config:
        return _Config(self.runtime)

    def create_execution_context(self, config: _Config) -> _Context:
        assert config.strategy == tensorrt_rtx.ExecutionContextAllocationStrategy.USER_MANAGED
        specialisation = tensorrt_rtx.DynamicShapesKernelSpecializationStrategy
        assert config.dynamic_shapes_kernel_specialization_strategy == specialisation.EAGER
        assert config.cuda_graph_strategy == tensorrt_rtx.CudaGraphStrategy.DISABLED
        assert config.cache is self.runtime.caches[-1]
        return _Context(self)


class _Context:
    """One profile: set before shapes, as the library wants it."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._profile = -1
        self._scratch = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return 0 <= profile < len(self._engine.manifest.profiles)

    def set_device_memory(self, address: int, size: int) -> None:
        assert address and size >= self._engine.device_memory_size_v2
        self._scratch = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._note("tell", (name, shape))
        spec = next(s for s in self._engine.segment.inputs if s.name == name)
        profile = list(self._engine.manifest.profiles.values())[self._profile]
        least, _, most = shape_range(spec.dims, profile, self._engine.manifest.build.max_batch)
        self._shapes[name] = shape
        return len(shape) == len(least) and all(a <= s <= b for a, s, b in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._note("tell", (name, address))
        self._addresses[name] = address
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return self._engine.runtime.capturable

    def execute_async_v3(self, stream: int) -> bool:
        """What runs is the device's work: a mode that watches the host's does not see it."""
        assert self._profile >= 0 and self._scratch
        self._note("enqueue", (*self._shapes.items(), *self._addresses.items()))
        with disable_current_modes():
            self._evaluate()
        self._engine.runtime.executed.append((self._engine.name, self._profile))
        return True

    def _note(self, what: str, detail: object) -> None:
        self._engine.runtime.journal.append(Event(what, self._engine.name, id(self), detail))

    def _evaluate(self) -> None:
        segment = self._engine.segment
        inputs = {s.name: self._view(s.name, s.dtype, self._shapes[s.name]) for s in segment.inputs}
        for name, value in self._engine.evaluator.run(inputs).items():
            spec = next(s for s in segment.outputs if s.name == name)
            target = self._view(name, spec.dtype, tuple(value.shape))
            if target.data_ptr() != value.data_ptr():
                target.copy_(value)

    def _view(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """The memory at an address as a tensor."""
        kind = TORCH_TYPES[dtype]
        size = int(np.prod(shape)) * kind.itemsize
        raw = (ctypes.c_uint8 * size).from_address(self._addresses[name])
        return torch.frombuffer(raw, dtype=kind).reshape(shape)


def executed_profiles(library: FakeTensorRt) -> Mapping[int, int]:
    """Engine runs by profile number."""
    counts: dict[int, int] = {}
    for _, profile in library.executed:
        counts[profile] = counts.get(profile, 0) + 1
    return counts
