"""Device memory by CUDA's driver alone: recorded calls are repeated in processes without torch.

Under compute-sanitizer a process is as quick as what it loads and launches is little.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
DRIVER = "libcuda.so.1"


class DriverError(RuntimeError):
    """The driver refused a call."""


class Memory(Protocol):
    """What a call's memory is read from, or laid out in."""

    def allocate(self, size: int) -> int:
        """The address of as many new bytes, a multiple of 256."""
        ...

    def free(self, address: int) -> None:
        """Give them back."""
        ...

    def read(self, address: int, size: int) -> Bytes:
        """A copy of what is there."""
        ...

    def write(self, address: int, values: Bytes) -> None:
        """Put it there."""
        ...

    def wait(self) -> None:
        """Until all that was launched has ended."""
        ...

    def recording(self, stream: int) -> bool:
        """Whether the stream collects launches for a graph: nothing may be read then."""
        ...


class Device:
    """The memory of the first GPU in its primary context, which torch and the CUDA runtime use as well."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL(DRIVER)
        self._call("cuInit", ctypes.c_uint(0))
        device, context = ctypes.c_int(0), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def stream(self) -> int:
        """A new stream that waits for no other."""
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(1))
        return int(made.value or 0)

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64(0)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def read(self, address: int, size: int) -> Bytes:
        values = np.empty(size, np.uint8)
        if size > 0:
            self._call("cuMemcpyDtoH_v2", _address_of(values), ctypes.c_uint64(address), ctypes.c_size_t(size))
        return values

    def write(self, address: int, values: Bytes) -> None:
        if values.size > 0:
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), _address_of(values), ctypes.c_size_t(values.size))

    def wait(self) -> None:
        self._call("cuCtxSynchronize")

    def recording(self, stream: int) -> bool:
        status = ctypes.c_int(0)
        self._call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
        return status.value != 0

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise DriverError(f"{name}: the driver answered {status}")


def _address_of(values: Bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)
