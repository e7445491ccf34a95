"""Programs of plugins for the plugin host on a GPU: written as files, run directly, as a CUDA graph and by threads. No
test here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.tensorrt import plugin_host

# nvinfer1::DataType; packed bytes travel as signed ones.
TYPES = {
    torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.uint8: 2, torch.int32: 3, torch.float8_e4m3fn: 6,
    torch.bfloat16: 7, torch.int64: 8,
}  # fmt: skip

THREADS = 4  # of the host, each with contexts of its own


def raw(tensor: Tensor) -> bytes:
    """The elements, row major."""
    return bytes(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


def _text(text: str) -> bytes:
    return struct.pack("<i", len(text)) + text.encode()


def _ints(values: list[int]) -> bytes:
    return struct.pack(f"<{1 + len(values)}i", len(values), *values)


@dataclass(frozen=True)
class Call:
    """One plugin and the names of its tensors in its order; in_place: the inputs that it changes."""

    plugin: str
    fields: dict[str, int | float]
    inputs: list[str]
    in_place: list[str]
    results: list[str]

    def packed(self, number: dict[str, int]) -> bytes:
        """As the host reads it; number: of the tensors."""
        out = _text(self.plugin) + struct.pack("<i", len(self.fields))
        for name, value in self.fields.items():
            real = isinstance(value, float)
            out += _text(name) + struct.pack("<if" if real else "<ii", real, value)
        out += struct.pack("<i", len(self.inputs))
        for name in self.inputs:
            out += struct.pack("<ii", number[name], name in self.in_place)
        return out + _ints([number[name] for name in self.results])


@dataclass(frozen=True)
class PluginProgram:
    """Plugins one after the other over tensors by name, as an engine runs them.

    start: what has data before the first step; between: what plugins write for one another, of these types and sizes;
    steps: what each step is given, equal names and sizes; outputs: kept after each step; state: of the start, kept at
    the end.
    """

    calls: list[Call]
    start: dict[str, Tensor]
    between: dict[str, Tensor]
    steps: list[dict[str, Tensor]]
    outputs: list[str]
    state: list[str]

    def write(self, path: Path) -> None:
        """The file that tests/tensorrt/host/device.cpp reads."""
        tensors = {**self.start, **self.between, **self.steps[0]}
        number = {name: i for i, name in enumerate(tensors)}
        out = struct.pack("<i", len(tensors))
        for tensor in tensors.values():
            out += struct.pack(f"<ii{tensor.dim()}q", TYPES[tensor.dtype], tensor.dim(), *tensor.shape)
        out += struct.pack("<i", len(self.calls)) + b"".join(call.packed(number) for call in self.calls)
        for names in (self.start, self.steps[0], self.outputs, self.state):
            out += _ints([number[name] for name in names])
        with path.open("wb") as file:
            file.write(out + struct.pack("<i", len(self.steps)))
            for tensor in self.start.values():
                file.write(raw(tensor))
            for step in self.steps:
                file.write(b"".join(raw(step[name]) for name in self.steps[0]))

    def run(self, host: Path, folder: Path) -> list[bytes]:
        """What the plugins wrote, launched directly, replayed and by each of the threads: outputs, then the state."""
        path = folder / "case"
        self.write(path)
        lean = plugin_host.lean_libraries(plugin_host.headers()[0].major)
        plugin_host.run(host, "--run", str(path), *map(str, lean[:1]))
        threads = sorted(folder.glob("case.thread*"))
        assert len(threads) == THREADS
        return [file.read_bytes() for file in (Path(f"{path}.out"), Path(f"{path}.replayed"), *threads)]

    def check(self, host: Path, folder: Path, outputs: list[Tensor], state: list[Tensor]) -> None:
        """Every run wrote these bits; outputs: the results of each step, step after step."""
        direct, replayed, *threads = self.run(host, folder)
        expected = b"".join(raw(tensor) for tensor in (*outputs, *state))
        assert len(direct) == len(expected)
        if direct != expected:
            first = next(i for i, (x, y) in enumerate(zip(direct, expected, strict=True)) if x != y)
            sizes = [len(raw(tensor)) for tensor in (*outputs, *state)]
            raise AssertionError(f"first difference at byte {first} of {sizes}")
        assert replayed == direct, "the replayed graph wrote other bits"
        assert all(one == direct for one in threads), "contexts disturb one another"


@dataclass(frozen=True)
class PluginCase:
    """One plugin. steps: the inputs of each step up to the state, in the plugin's order; state: in-place inputs at the
    start, which follow; results: type and channels of each dense output.
    """

    plugin: str
    fields: dict[str, int | float]
    steps: list[list[Tensor]]
    state: list[Tensor]
    results: list[tuple[torch.dtype, int]]

    def program(self) -> PluginProgram:
        """The plugin alone."""
        given = [f"input {i}" for i in range(len(self.steps[0]))]
        state = {f"state {i}": tensor for i, tensor in enumerate(self.state)}
        rows = self.steps[0][0].shape[:2]
        results = {f"out {i}": torch.empty(*rows, n, dtype=t) for i, (t, n) in enumerate(self.results)}
        call = Call(self.plugin, self.fields, [*given, *state], [*state], [*results])
        steps = [dict(zip(given, step, strict=True)) for step in self.steps]
        return PluginProgram([call], state, results, steps, [*results], [*state])

    def check(self, host: Path, folder: Path, outputs: list[Tensor], state: list[Tensor]) -> None:
        """As `PluginProgram.check`."""
        self.program().check(host, folder, outputs, state)
