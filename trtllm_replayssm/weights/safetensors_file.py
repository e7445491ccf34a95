"""One .safetensors file: the safetensors library checks it and lists its tensors; elements are views of the file.

The library's numpy front end cannot return F8_E4M3 and copies what it returns, so that only the bytes of a tensor are
read here; where they lie follows from the library's order by offset, since the format has no holes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from trtllm_replayssm.errors import CheckpointError

NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


def data_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor's elements; dtype: a key of NUMPY_TYPES."""
    return math.prod(shape) * NUMPY_TYPES[dtype].itemsize


class Tensor:
    """A tensor in a file: its header entry, and its elements on demand.

    name: as in the file; dtype: the format's name (a key of NUMPY_TYPES); shape: of the stored array.
    """

    __slots__ = ("_begin", "_file", "dtype", "name", "shape")

    def __init__(self, file: SafetensorsFile, name: str, dtype: str, shape: tuple[int, ...], begin: int) -> None:
        self._file = file
        self._begin = begin
        self.name = name
        self.dtype = dtype
        self.shape = shape

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return data_bytes(self.dtype, self.shape)

    @property
    def path(self) -> Path:
        """The file that holds it."""
        return self._file.path

    def array(self) -> NDArray[Any]:
        """A read-only view of the mapped file; a copy only where the file does not align the data."""
        dtype = NUMPY_TYPES[self.dtype]
        view = self._file.data()[self._begin : self._begin + self.nbytes]
        if self._begin % dtype.itemsize:
            view = view.copy()
            view.flags.writeable = False
        return view.view(dtype).reshape(self.shape)

    def middle(self, most: int) -> bytes:
        """At most so many bytes from the middle of the elements, whatever they mean."""
        size = min(most, self.nbytes)
        begin = self._begin + (self.nbytes - size) // 2
        return self._file.data()[begin : begin + size].tobytes()


class SafetensorsFile:
    """The tensors of one file by name. Raises CheckpointError for a damaged or truncated file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: NDArray[np.uint8] | None = None
        try:
            with safe_open(path, framework="np") as handle:
                slices = {name: handle.get_slice(name) for name in handle.offset_keys()}
                listed = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()]
            with path.open("rb") as stream:
                begin = 8 + int.from_bytes(stream.read(8), "little")
        except (SafetensorError, OSError) as error:
            raise self._error("a complete .safetensors file", error) from error
        self.tensors: dict[str, Tensor] = {}
        for name, dtype, shape in listed:
            if dtype not in NUMPY_TYPES:
                raise self._error(f"a dtype out of {sorted(NUMPY_TYPES)}", dtype, name)
            tensor = Tensor(self, name, dtype, shape, begin)
            self.tensors[name] = tensor
            begin += tensor.nbytes

    def data(self) -> NDArray[np.uint8]:
        """The whole file's bytes, mapped when first asked for."""
        if self._data is None:
            self._data = np.memmap(self.path, dtype=np.uint8, mode="r").view(np.ndarray)
        return self._data

    def close(self) -> None:
        """Drop the mapping; arrays handed out keep theirs."""
        self._data = None

    def _error(self, expected: object, got: object, tensor: str = "") -> CheckpointError:
        where = f"{tensor} in {self.path.name}" if tensor else str(self.path)
        return CheckpointError("read safetensors", where, expected=expected, got=got, hint="Download the file again")
