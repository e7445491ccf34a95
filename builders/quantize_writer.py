"""Writes .safetensors files whose tensors are known beforehand and arrive one by one, so that memory stays bounded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import InvariantError
from trtllm_replayssm.weights.safetensors_file import NUMPY_TYPES, data_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """name, format dtype (a key of NUMPY_TYPES) and shape of one tensor to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return data_bytes(self.dtype, self.shape)


class SafetensorsWriter:
    """One file. Wide types come first, so that every tensor is aligned, as the safetensors library orders them."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        ordered = sorted(entries, key=lambda e: (-NUMPY_TYPES[e.dtype].itemsize, e.name))
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        self._pending: dict[str, tuple[Entry, int]] = {}
        self._slices: dict[str, int] = {}
        at = 0
        for entry in ordered:
            if entry.name in header:
                raise InvariantError("write safetensors", entry.name, expected="each name once", got="twice")
            header[entry.name] = {
                "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + entry.nbytes],
            }  # fmt: skip
            self._pending[entry.name] = (entry, at)
            at += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
        self._data_start = 8 + len(text)
        self._stream = path.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, array: NDArray[Any]) -> None:
        """The elements of one tensor, in any order of tensors; each exactly once, in its declared type and shape."""
        if name not in self._pending:
            raise InvariantError("write safetensors", name, expected="a tensor declared and not yet written", got=name)
        entry, at = self._pending.pop(name)
        if (array.dtype, array.shape) != (NUMPY_TYPES[entry.dtype], entry.shape):
            raise InvariantError("write safetensors", name, expected=entry, got=f"{list(array.shape)} {array.dtype}")
        self._stream.seek(self._data_start + at)
        self._stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def write_slice(self, name: str, index: int, array: NDArray[Any]) -> None:
        """Element `index` of a tensor's first axis; each exactly once, instead of `write`."""
        entry, at = self._pending[name]
        if (array.dtype, array.shape) != (NUMPY_TYPES[entry.dtype], entry.shape[1:]):
            raise InvariantError("write safetensors", name, expected=entry, got=f"{list(array.shape)} {array.dtype}")
        self._stream.seek(self._data_start + at + index * array.nbytes)
        self._stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._slices[name] = self._slices.get(name, 0) + 1
        if self._slices[name] == entry.shape[0]:
            self._pending.pop(name)

    def close(self, *, complete: bool = True) -> None:
        """Flush to the disk; `complete` checks that every tensor was written."""
        with self._stream:
            if complete:
                if self._pending:
                    raise InvariantError("write safetensors", next(iter(self._pending)), expected="data", got="none")
                self._stream.flush()
                os.fsync(self._stream.fileno())
