"""What a builder says while it compiles, as a record: every engine layer with its types, and scratch memory by profile.

Without a GPU an engine cannot be opened again, so this record, kept in the bundle, is what tells which matmul runs in
which type. It is read from the library's verbose messages at detailed profiling verbosity.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trtllm_replayssm.weights.matrix import MatrixFormat

_LAYER = re.compile(
    r"^Name: (?P<name>.*?), LayerType: (?P<type>\w+), Inputs: \[(?P<inputs>.*?)\], Constants: \[(?P<constants>.*?)\], "
    r"Outputs: \[(?P<outputs>.*?)\], TacticName: (?P<tactic>.*?), StreamId: \d+.*?, Metadata: (?P<metadata>.*)$",
)
_TENSOR = re.compile(r"\{ Name: (.*?), Dimensions: \[(.*?)\],.*?Datatype: (\w+), Format")
_SCRATCH = re.compile(r"^Total Activation Memory: (\d+) bytes")  # scratch of layers, and tensors between them
_KEPT = re.compile(r"^Total Device Persistent Memory: (\d+) bytes")
_PROFILE = re.compile(r"_myl(\d+)_\d+$")
_SEPARATOR = "\x1f"  # between the names of network layers that became one
_MATMULS = ("gemm", "runtime_fusion")
_NAMES = {"FP4E2M1": "fp4", "FP8": "fp8", "BFloat16": "bfloat16", "Half": "float16", "Float": "float32"}
_KINDS = {"fp4": MatrixFormat.NVFP4, "fp8": MatrixFormat.FP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTensor:
    """A tensor of a compiled layer; -1 is a dynamic extent."""

    name: str
    dims: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLayer:
    """One compiled layer of one profile; modules: network layers it was made of, as far as they had metadata."""

    name: str
    type: str
    tactic: str
    modules: tuple[str, ...]
    inputs: tuple[EngineTensor, ...]
    constants: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]

    @property
    def profile(self) -> int:
        """Number of the optimisation profile that it belongs to."""
        match = _PROFILE.search(self.name)
        return int(match[1]) if match else 0

    @property
    def matmul_format(self) -> MatrixFormat | None:
        """FP8 or NVFP4 when a matmul multiplies both operands in that type, None for any other layer."""
        if self.type not in _MATMULS or not self.inputs:
            return None
        kind = self.inputs[0].dtype
        both = any(c.dtype == kind and len(c.dims) > 1 for c in self.constants)
        return _KINDS.get(kind) if both else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """scratch_bytes: of an execution context by profile number, while it runs; kept_bytes: while it exists; quantised:
    matmul layers of the network with quantised weights -> format.
    """

    engine: str
    label: str
    bytes: int
    seconds: float
    scratch_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]
    quantised: dict[str, MatrixFormat]
    layers: tuple[EngineLayer, ...]


def parse_messages(messages: Iterable[str]) -> tuple[tuple[EngineLayer, ...], tuple[int, ...], tuple[int, ...]]:
    """(layers, scratch bytes by profile, kept bytes by profile) of one build's messages."""
    layers: list[EngineLayer] = []
    scratch: list[int] = []
    kept: list[int] = []
    for message in messages:
        for line in message.split("\n"):
            if (found := _LAYER.match(line)) is not None:
                layers.append(_layer(found))
            elif (size := _SCRATCH.match(line)) is not None:
                scratch.append(int(size[1]))
            elif (size := _KEPT.match(line)) is not None:
                kept.append(int(size[1]))
    return tuple(layers), tuple(scratch), tuple(kept)


def quantised_layers(record: EngineRecord, profile: int) -> dict[str, MatrixFormat]:
    """Network layers that run as FP8 or FP4 matmuls in a profile, by name."""
    return {
        module: fmt
        for layer in record.layers
        if layer.profile == profile and (fmt := layer.matmul_format) is not None
        for module in layer.modules
    }


def _layer(found: re.Match[str]) -> EngineLayer:
    return EngineLayer(
        name=found["name"], type=found["type"], tactic=found["tactic"],
        modules=tuple(name for name in found["metadata"].strip().split(_SEPARATOR) if name),
        inputs=_tensors(found["inputs"]), constants=_tensors(found["constants"]),
        outputs=_tensors(found["outputs"]),
    )  # fmt: skip


def _tensors(text: str) -> tuple[EngineTensor, ...]:
    def extents(dims: str) -> tuple[int, ...]:
        return tuple(int(d) for d in dims.split(",") if d)

    return tuple(
        EngineTensor(name=name, dims=extents(dims), dtype=_NAMES.get(dtype, dtype.lower()))
        for name, dims, dtype in _TENSOR.findall(text)
    )
