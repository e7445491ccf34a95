"""Cases for the plugin host on a GPU: written as files, run directly, as a CUDA graph and by threads. No test here."""

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

THREADS = 4  # of the host, each with a context of its own


def raw(tensor: Tensor) -> bytes:
    """The elements, row major."""
    return bytes(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True)
class PluginCase:
    """steps: the inputs of each step up to the state, in the plugin's order; state: in-place inputs at the start, which
    follow; results: type and channels of each dense output.
    """

    plugin: str
    fields: dict[str, int | float]
    steps: list[list[Tensor]]
    state: list[Tensor]
    results: list[tuple[torch.dtype, int]]

    def write(self, path: Path) -> None:
        """The file that tests/tensorrt/host/device.cpp reads."""
        out = struct.pack("<i", len(self.fields))
        for name, value in self.fields.items():
            real = isinstance(value, float)
            out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<if" if real else "<ii", real, value)
        inputs = [*((t, 0) for t in self.steps[0]), *((t, 1) for t in self.state)]
        out += struct.pack("<i", len(inputs))
        for tensor, in_place in inputs:
            out += struct.pack(f"<iii{tensor.dim()}q", TYPES[tensor.dtype], in_place, tensor.dim(), *tensor.shape)
        out += struct.pack("<i", len(self.results))
        for dtype, width in self.results:
            out += struct.pack("<ii", TYPES[dtype], width)
        out += struct.pack("<i", len(self.steps))
        with path.open("wb") as file:
            file.write(out)
            for tensor in (*self.state, *(t for step in self.steps for t in step)):
                file.write(raw(tensor))

    def run(self, host: Path, folder: Path) -> list[bytes]:
        """What the plugin wrote, launched directly, replayed and by each of the threads: outputs, then the state."""
        path = folder / "case"
        self.write(path)
        lean = plugin_host.lean_libraries(plugin_host.headers()[0].major)
        plugin_host.run(host, "--run", self.plugin, str(path), *map(str, lean[:1]))
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
