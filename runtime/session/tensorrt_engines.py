"""A bundle's engine files on a GPU: loaded once, their execution contexts over one shared scratch.

Imports the TensorRT flavour that the bundle was built with when it is made, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bindings import EngineStep
from trtllm_replayssm.collection import no_collection
from trtllm_replayssm.errors import ConfigError, ContractError, DeviceError, EngineMismatchError
from trtllm_replayssm.manifest import Manifest
from trtllm_replayssm.runtime.session.tensorrt_kernels import KernelCache

PLUGIN_FLAVOUR = "tensorrt"


@dataclass
class _Context:
    """One execution context and what it was told last: a step over the same tensors tells it nothing again."""

    context: Any
    profile: int
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)

    def tell(self, engine: str, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Shapes of the inputs and memory of all. Raises ContractError outside the profile."""
        for name, tensor in inputs.items():
            self._set_shape(f"{engine}: {name}", name, tensor)
        for name, tensor in (*inputs.items(), *outputs.items()):
            self._set_address(f"{engine}: {name}", name, tensor)

    def _set_shape(self, where: str, name: str, tensor: Tensor) -> None:
        if self.shapes.get(name) == tensor.shape:
            return
        if not self.context.set_input_shape(name, tuple(tensor.shape)):
            raise ContractError(
                "run engine", where, expected=f"a shape within profile {self.profile}", got=list(tensor.shape),
                hint="Build with larger limits",
            )  # fmt: skip
        self.shapes[name] = tensor.shape

    def _set_address(self, where: str, name: str, tensor: Tensor) -> None:
        if self.addresses.get(name) == tensor.data_ptr():
            return
        if not tensor.is_contiguous():
            raise ContractError("run engine", where, expected="dense memory", got=tensor.stride())
        self.context.set_tensor_address(name, tensor.data_ptr())
        self.addresses[name] = tensor.data_ptr()


class TensorRtEngines:
    """Implements `tensorrt_program.Engines` on the device's current stream.

    HAZARD: a graph holds the state that its execution contexts had when it was recorded, and contexts that are told
    other shapes or addresses afterwards spoil it. What is recorded therefore has contexts of its own; all contexts
    share one scratch, since engines run one after another on one stream.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, device: torch.device, kernels: KernelCache,
        plugin_library: str | Path | None = None, communicator: Any = None,
    ) -> None:  # fmt: skip
        """communicator: capsule of an NCCL communicator, for engines that exchange with those of other ranks.

        Raises ConfigError or EngineMismatchError when library, GPU and bundle do not fit.
        """
        trt = _library(manifest)
        self._plugins = manifest.build.flavour == PLUGIN_FLAVOUR
        self._kernels = kernels
        if self._plugins:
            _load_plugins(trt, plugin_library)
        self._trt, self._communicator = trt, communicator
        self._messages: list[str] = []
        self._logger = _logger(trt, self._messages)
        # the library logs under a lock, and a forgotten runtime that were freed there would wait for it
        with no_collection():
            self._runtime = trt.Runtime(self._logger)
        self._engines: dict[str, Any] = {}
        for program in manifest.programs.values():
            for step in program.steps:
                if isinstance(step, EngineStep) and step.engine not in self._engines:
                    self._engines[step.engine] = self._load(directory / step.engine)
        self._shared: dict[tuple[str, int], _Context] = {}
        self._unproven: list[tuple[str, _Context]] = []  # contexts of work that is about to be recorded
        sizes = [e.device_memory_size_v2 for e in self._engines.values()]
        self._scratch = torch.empty(max([1, *sizes]), dtype=torch.uint8, device=device)

    def bind(
        self, engine: str, profile: int, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, own: bool
    ) -> Callable[[], None]:
        """See `Engines`."""
        if own:
            context = self._new_context(engine, profile)
            context.tell(engine, inputs, outputs)
            self._unproven.append((engine, context))
            return lambda: self._enqueue(engine, context)
        if (engine, profile) not in self._shared:
            self._shared[engine, profile] = self._new_context(engine, profile)
        shared = self._shared[engine, profile]

        def run() -> None:
            shared.tell(engine, inputs, outputs)
            self._enqueue(engine, shared)

        return run

    def obstacle(self) -> str | None:
        """See `Engines`. `tensorrt` answers no such question, and has networks here that it can always record."""
        stream, unproven = self._stream(), self._unproven
        self._unproven = []
        for engine, context in () if self._plugins else unproven:
            if not context.context.is_stream_capturable(stream):
                shapes = {name: list(shape) for name, shape in context.shapes.items()}
                return f"{self._trt.__name__} cannot record {engine} with {shapes}"
        return None

    def save_kernels(self) -> None:
        """See `Engines`."""
        self._kernels.save()

    def _enqueue(self, engine: str, context: _Context) -> None:
        if not context.context.execute_async_v3(self._stream()):
            raise DeviceError("run engine", engine, expected="an engine that runs", got=self._last_message())

    def _stream(self) -> int:
        device = self._scratch.device
        return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0

    def _new_context(self, engine: str, profile: int) -> _Context:
        """A context over the shared scratch. RTX compiles kernels for the shapes it meets: all at the first use of a
        shape, kept in one cache, so that no step waits for one later and what is recorded stays the best there is.
        """
        trt, loaded = self._trt, self._engines[engine]
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._plugins:
            context = loaded.create_execution_context(strategy)
        else:
            config = loaded.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # whole steps are recorded, not engines
            self._kernels.give_to(config)
            context = loaded.create_execution_context(config)
        if context is None or not context.set_optimization_profile_async(profile, self._stream()):
            raise DeviceError("run engine", engine, expected="an execution context", got=self._last_message())
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        # waits for the other ranks, which make their contexts in the same order
        if self._communicator is not None and not context.set_communicator(self._communicator):
            raise DeviceError("run engine", engine, expected="a communicator it takes", got=self._last_message())
        return _Context(context, profile)

    def _load(self, path: Path) -> Any:
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineMismatchError(
                "load engine", path.name, expected=f"an engine for this GPU and {self._trt.__name__} "
                f"{self._trt.__version__}", got=self._last_message(), hint="Build the bundle on, or for, this GPU",
            )  # fmt: skip
        return engine

    def _last_message(self) -> str:
        return self._messages[-1] if self._messages else "no reason given"


def _library(manifest: Manifest) -> Any:
    name = manifest.build.flavour
    try:
        trt = import_module(name)
    except ImportError as error:
        raise ConfigError(
            "load bundle", "flavour", expected=f"an installed {name}", got=f"ImportError: {error}",
            hint=f"In a checkout: pip install -e '.[{name.replace('_', '-')}]'",
        ) from error  # fmt: skip
    if trt.__version__ != manifest.build.tensorrt_version:
        raise EngineMismatchError(
            "load bundle", "tensorrt_version", expected=manifest.build.tensorrt_version, got=trt.__version__,
            hint="Build the bundle again, or install the version that it was built with",
        )  # fmt: skip
    return trt


def _load_plugins(trt: Any, library: str | Path | None) -> None:
    """Into the registry, where engines find the plugins that they name."""
    if library is None or trt.get_plugin_registry().load_library(str(library)) is None:
        raise ConfigError(
            "load bundle", "plugin_library", expected="a plugin library that TensorRT loads", got=library,
            hint="Give the path of libtrtllm_replayssm_plugins.so",
        )  # fmt: skip


def _logger(trt: Any, messages: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps what the library says about errors, for ours."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity.name in ("ERROR", "INTERNAL_ERROR"):
                messages.append(text[:400])

    return Logger()
