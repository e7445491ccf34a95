"""ctypes mirror of the native library's public headers (plugins/include/replayssm), and the library handle.

Structs are filled by field name only. `tests/native/test_abi_mirror.py` compares sizes and offsets with the headers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import (
    CapacityError,
    ContractError,
    DeviceError,
    EngineMismatchError,
    InvariantError,
    ReplaySSMError,
    UnsupportedError,
)

ABI_VERSION = 1
MAX_RANK = 4
ERROR_CHARS = 508
UPDATE_PROGRAMMATIC_LAUNCH = 1
CONVENTIONAL_PROGRAMMATIC_LAUNCH = 1


class Dtype(IntEnum):
    """RSSM_FLOAT32 ... of tensor.h."""

    NONE = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT8_E4M3 = 4
    FLOAT4_E2M1 = 5
    INT32 = 6
    INT64 = 7


class Kind(IntEnum):
    """RSSM_MAMBA2, RSSM_GDN of update.h."""

    MAMBA2 = 1
    GDN = 2


class Status(IntEnum):
    """RSSM_OK ... of status.h."""

    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    WORKSPACE_TOO_SMALL = 3
    ABI_MISMATCH = 4
    CUDA_ERROR = 5
    INTERNAL = 6


_ERRORS: dict[Status, type[ReplaySSMError]] = {
    Status.INVALID_ARGUMENT: ContractError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.WORKSPACE_TOO_SMALL: CapacityError,
    Status.ABI_MISMATCH: EngineMismatchError,
    Status.CUDA_ERROR: DeviceError,
    Status.INTERNAL: InvariantError,
}


class ErrorRecord(ctypes.Structure):
    """rssm_error: status and message of the last failing call that was given this record."""

    _fields_ = [("status", ctypes.c_int32), ("message", ctypes.c_char * ERROR_CHARS)]


class Tensor(ctypes.Structure):
    """rssm_tensor: a view of device memory, strides in elements. The default value is an absent tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("stride", ctypes.c_int64 * MAX_RANK),
    ]


class UpdateArgs(ctypes.Structure):
    """rssm_update_args: one decode step of one layer; see update.h for every field's shape and dtype."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("head_offset", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_int32),
        *[
            (name, Tensor)
            for name in (
                "slot", "num_tokens", "origin", "h", "position", "seed",
                "value", "k", "q", "dt", "a", "skip", "log_decay", "beta", "out",
                "checkpoint", "checkpoint_scale", "read", "read_scale", "read_head_scale",
                "ring_value", "ring_k", "ring_dt", "ring_key_factor", "ring_v", "ring_beta",
            )
        ],
    ]  # fmt: skip


class CommitArgs(ctypes.Structure):
    """rssm_commit_args: the cursors of all rows after a step; see commit.h."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("window", ctypes.c_int32),
        ("ring_rows", ctypes.c_int32),
        *[(name, Tensor) for name in ("slot", "num_tokens", "accepted", "origin", "h", "position")],
    ]


class ConventionalArgs(ctypes.Structure):
    """rssm_conventional_args: one step of the baseline on one layer; see conventional.h."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("abi_version", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        *[
            (name, Tensor)
            for name in (
                "slot", "num_tokens", "entry",
                "value", "k", "q", "dt", "a", "skip", "log_decay", "beta", "out", "state",
            )
        ],
    ]  # fmt: skip


def tensor(data: int, dtype: Dtype, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """A view of `data` (device address) with `shape` and `stride` in elements; rank at most 4."""
    if len(shape) > MAX_RANK or len(shape) != len(stride):
        raise ContractError("tensor", "shape", expected=f"rank <= {MAX_RANK} and as many strides", got=(shape, stride))
    view = Tensor(data=data, dtype=int(dtype), rank=len(shape))
    for axis, (size, step) in enumerate(zip(shape, stride, strict=True)):
        view.shape[axis] = size
        view.stride[axis] = step
    return view


class Library:
    """The loaded native library. Calls raise the package's errors; nothing is kept between calls."""

    def __init__(self, path: Path) -> None:
        """path: the shared library. Raises EngineMismatchError when its ABI version is not this module's."""
        self._handle = ctypes.CDLL(str(path))
        self._handle.rssm_abi_version.restype = ctypes.c_uint32
        self._handle.rssm_update_supported.restype = ctypes.c_char_p
        version = self._handle.rssm_abi_version()
        if version != ABI_VERSION:
            raise EngineMismatchError("load native library", "abi_version", expected=ABI_VERSION, got=version)

    def supported_updates(self) -> list[str]:
        """One line per built combination of the update family."""
        text: bytes = self._handle.rssm_update_supported()
        return text.decode().splitlines()

    def update_workspace(self, args: UpdateArgs) -> int:
        """Device bytes `update` needs beside the tensors of `args`."""
        size = ctypes.c_size_t(0)
        self._call("rssm_update_workspace", _sized(args), ctypes.byref(size))
        return size.value

    def update(self, args: UpdateArgs, workspace: int, workspace_bytes: int, stream: int) -> None:
        """Enqueue one step on `stream` (a cudaStream_t as an integer)."""
        self._call(
            "rssm_update",
            _sized(args),
            ctypes.c_void_p(workspace),
            ctypes.c_size_t(workspace_bytes),
            ctypes.c_void_p(stream),
        )

    def commit(self, args: CommitArgs, stream: int) -> None:
        """Enqueue the cursor commit on `stream`."""
        self._call("rssm_commit", _sized(args), ctypes.c_void_p(stream))

    def conventional_update(self, args: ConventionalArgs, stream: int) -> None:
        """Enqueue one step of the baseline on `stream`."""
        self._call("rssm_conventional_update", _sized(args), ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        record = ErrorRecord()
        status = Status(getattr(self._handle, name)(*arguments, ctypes.byref(record)))
        if status is not Status.OK:
            raise _error(status, name, record.message.decode(errors="replace"))


def _sized(args: UpdateArgs | CommitArgs | ConventionalArgs) -> Any:
    args.struct_size = ctypes.sizeof(args)
    args.abi_version = ABI_VERSION
    return ctypes.byref(args)


def _error(status: Status, name: str, message: str) -> ReplaySSMError:
    """The package's error for a native message `operation: argument: expected ..., got ...`."""
    operation, _, rest = message.partition(": ")
    argument, _, detail = rest.partition(": ")
    expected, found, got = detail.removeprefix("expected ").rpartition(", got ")
    return _ERRORS[status](
        operation or name, argument or "call", expected=expected if found else "success", got=got if found else detail
    )
