"""One .safetensors file: header parsed and checked, tensors as read-only views of the mapped file.

The numpy front end of the safetensors library cannot return F8_E4M3, so that the format (8 bytes of header length,
a JSON header, the data) is read here; nothing but the header is touched until a tensor's bytes are used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

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
        return math.prod(self.shape) * NUMPY_TYPES[self.dtype].itemsize

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


class SafetensorsFile:
    """The tensors of one file by name. Raises CheckpointError for a damaged or truncated file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data: NDArray[np.uint8] | None = None
        try:
            self._size = path.stat().st_size
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if self._size < 8 or length > min(self._size - 8, MAX_HEADER_BYTES):
                    raise self._error(
                        "a header of at most the file's bytes", f"{length} bytes in a file of {self._size}"
                    )
                header = json.loads(stream.read(length))
        except OSError as error:
            raise self._error("a readable file", error) from error
        except ValueError as error:
            if isinstance(error, CheckpointError):
                raise
            raise self._error("a JSON header", error) from error
        if not isinstance(header, dict):
            raise self._error("a JSON object as header", type(header).__name__)
        self._data_start = 8 + length
        header.pop("__metadata__", None)
        self.tensors = {name: self._entry(name, entry) for name, entry in header.items()}
        self._check_layout()

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

    def _entry(self, name: str, entry: Any) -> Tensor:
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            sizes_ok = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            sizes_ok = False
        if not sizes_ok:
            raise self._error("an entry with dtype, shape and two data_offsets", entry, name)
        if dtype not in NUMPY_TYPES:
            raise self._error(f"a dtype out of {sorted(NUMPY_TYPES)}", dtype, name)
        tensor = Tensor(self, name, dtype, shape, self._data_start + begin)
        if tensor.nbytes != end - begin:
            raise self._error(f"{tensor.nbytes} bytes ({dtype} {list(shape)})", f"{end - begin} bytes", name)
        return tensor

    def _check_layout(self) -> None:
        """The data of the tensors fills the rest of the file without a hole or an overlap."""
        at = self._data_start
        for tensor in sorted(self.tensors.values(), key=lambda t: (t._begin, t.nbytes)):
            if tensor._begin != at:
                raise self._error(f"data at byte {at}", f"at byte {tensor._begin}", tensor.name)
            at += tensor.nbytes
            if at > self._size:
                raise self._error(f"data up to byte {at}", f"a file of {self._size} bytes", tensor.name)
        if at != self._size:
            raise self._error(f"{at} bytes", f"{self._size} bytes")
