"""Compiles one network after another into engine files, with the build's messages kept as a record.

The classes that the library calls back are made when the library is loaded; nothing of TensorRT is imported before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.build_log import EngineRecord, parse_messages
from trtllm_replayssm.builders.flavour import Flavour
from trtllm_replayssm.builders.network import Network
from trtllm_replayssm.builders.profiles import shape_range
from trtllm_replayssm.builders.segments import Segment
from trtllm_replayssm.collection import no_collection
from trtllm_replayssm.errors import DeviceError
from trtllm_replayssm.manifest import Profile
from trtllm_replayssm.weights.matrix import MatrixFormat

_PROBLEMS = ("INTERNAL_ERROR", "ERROR")
_QUANTISED = {"float4_e2m1": MatrixFormat.NVFP4, "float8_e4m3": MatrixFormat.FP8}


class Compiler:
    """One builder of a flavour. tick() is called at every step the library reports; it may raise to stop a build."""

    def __init__(
        self, flavour: Flavour, profiles: Mapping[str, Profile], *, slots: int, activation: str,
        tick: Callable[[], None],
    ) -> None:  # fmt: skip
        self._flavour = flavour
        self._profiles = profiles
        self._slots = slots
        self._activation = activation
        self._messages: list[tuple[str, str]] = []
        self._logger = _logger(flavour.trt, self._messages)
        # the library logs under a lock, and a forgotten builder that were freed there would wait for it
        with no_collection():
            self._builder = flavour.trt.Builder(self._logger)
        self._stopped: list[BaseException] = []
        self._monitor = _monitor(flavour.trt, tick, self._stopped)

    def new_network(self) -> Network:
        """An empty network."""
        return Network(self._flavour.trt, self._flavour.create_network(self._builder), self._activation)

    def compile(self, segment: Segment, path: Path, engine: str) -> EngineRecord:
        """Write the segment's engine to `path`. Raises DeviceError with the library's own words when it refuses."""
        began = time.monotonic()
        self._messages.clear()
        self._stopped.clear()
        config = self._config(segment)
        with path.open("wb") as stream:
            writer = _writer(self._flavour.trt, stream)
            done = self._builder.build_serialized_network_to_stream(segment.network.definition, config, writer)
        if self._stopped:
            raise self._stopped[0]
        if not done:
            raise DeviceError(
                "build", segment.label, expected=f"an engine for {self._flavour.target}", got=self._complaint(),
                hint=self._flavour.elsewhere,
            )  # fmt: skip
        layers, scratch, kept = parse_messages(text for _, text in self._messages)
        return EngineRecord(
            engine=engine, label=segment.label, bytes=path.stat().st_size, seconds=time.monotonic() - began,
            scratch_bytes=scratch, kept_bytes=kept, quantised=quantised_constants(segment.network), layers=layers,
        )  # fmt: skip

    def _config(self, segment: Segment) -> Any:
        trt = self._flavour.trt
        config = self._builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.clear_flag(trt.BuilderFlag.TF32)  # routers and recurrences are float32, not less
        config.progress_monitor = self._monitor
        self._flavour.set_target(config)
        for profile in self._profiles.values():
            ranges = self._builder.create_optimization_profile()
            for spec in segment.inputs:
                if any(isinstance(dim, str) for dim in spec.dims):
                    ranges.set_shape(spec.name, *shape_range(spec.dims, profile, self._slots))
            config.add_optimization_profile(ranges)
        return config

    def _complaint(self) -> str:
        problems = [text for severity, text in self._messages if severity in _PROBLEMS]
        return problems[0][:400] if problems else "no reason given"


def quantised_constants(network: Network) -> dict[str, MatrixFormat]:
    """Matmul layers whose weights the network holds in FP8 or NVFP4, by layer name."""
    return {
        name.removesuffix(".weight"): _QUANTISED[constant.dtype]
        for name, constant in network.constants.items()
        if name.endswith(".weight") and constant.dtype in _QUANTISED
    }


def _logger(trt: Any, messages: list[tuple[str, str]]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps every message; nothing is printed."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            messages.append((severity.name, text))

    return Logger()


def _monitor(trt: Any, tick: Callable[[], None], stopped: list[BaseException]) -> Any:
    def goes_on() -> bool:
        """Pass a step on. An exception cannot cross the library: it waits in `stopped`, and the build is called off."""
        try:
            if not stopped:
                tick()
        except BaseException as error:
            stopped.append(error)
        return not stopped

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Passes the library's steps on; the library asks after each whether to go on."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            goes_on()

        def step_complete(self, name: str, step: int) -> bool:
            return goes_on()

        def phase_finish(self, name: str) -> None:
            goes_on()

    return Monitor()


def _writer(trt: Any, stream: Any) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        """Writes the engine piece by piece, so that no second copy of it is in memory."""

        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: Any) -> int:
            return int(stream.write(data))

    return Writer()
