"""Large matrix products by cuBLAS without a workspace, and products in parts.

With a workspace, cuBLAS hands the tiles of a large product out through a counter, which a memset before the product
clears: two more gaps on the stream, 3 to 5 us. Without one it lays the tiles out beforehand. Products of few results
are cut along their inputs, so that more multiprocessors have work; whoever reads the parts adds them up, where cuBLAS
itself would round in between or add in a launch of its own.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from trtllm_replayssm.errors import DeviceError

_LEAST_RESULTS = 1 << 23  # of a product; smaller ones may be cut along K, which takes a workspace
# of products in two parts: beyond these they were not faster on an H200, or not measured
_MOST_ROWS, _MOST_WIDTH, _LEAST_INNER = 256, 4096, 4096
_WHOLE = 16  # K: a part's rows begin at whole 16 bytes
_TRANSPOSED, _PLAIN, _DEFAULT_ALGORITHM, _SUMS_FLOAT32 = 1, 0, -1, 68  # of cublas_api.h
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # of library_types.h


class LargeProducts:
    """Of one device; calls are enqueued on the current stream. Made and first used outside of a capture."""

    def __init__(self, device: torch.device, library: ctypes.CDLL) -> None:
        """library: cuBLAS. Raises DeviceError where it gives no handle."""
        self._device, self._library = device, library
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._require("cublasCreate", self._library.cublasCreate_v2(ctypes.byref(self._handle)))
        weakref.finalize(self, self._library.cublasDestroy_v2, self._handle).atexit = False  # a process takes it along

    @classmethod
    def on(cls, device: torch.device) -> LargeProducts | None:
        """None on a CPU, and where torch brings its cuBLAS under another name."""
        if device.type != "cuda":
            return None
        try:  # torch has loaded it
            library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
        except OSError:
            return None
        return cls(device, library)

    @staticmethod
    def serve(x: Tensor, weight: Tensor) -> bool:
        """Whether x [..., K] weight [N, K]^T is one of these."""
        if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype is not x.dtype:
            return False
        rows, width = x.numel() // x.shape[-1], len(weight)
        whole = x.shape[-1] % 8 == 0 and width % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
        return whole and rows * width >= _LEAST_RESULTS and weight.is_contiguous() and x.is_contiguous()

    def linear(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [..., K] weight [N, K]^T -> [..., N] in x's type or float32, float32 sums."""
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=dtype or x.dtype, device=x.device)
        width, inner, rows = len(weight), x.shape[-1], x.numel() // x.shape[-1]
        one, zero, library, handle = ctypes.c_float(1.0), ctypes.c_float(0.0), self._library, self._handle
        self._take_stream()
        # cuBLAS stores columns: out^T [N, rows] = weight [N, K] x^T
        code = library.cublasGemmEx(
            handle, _TRANSPOSED, _PLAIN, width, rows, inner, ctypes.byref(one),
            ctypes.c_void_p(weight.data_ptr()), _TYPES[weight.dtype], inner,
            ctypes.c_void_p(x.data_ptr()), _TYPES[x.dtype], inner, ctypes.byref(zero),
            ctypes.c_void_p(out.data_ptr()), _TYPES[out.dtype], width, _SUMS_FLOAT32, _DEFAULT_ALGORITHM,
        )  # fmt: skip
        self._require("cublasGemmEx", code)
        return out

    @staticmethod
    def parts_of(x: Tensor, weight: Tensor) -> int:
        """Into how many parts x [..., K] weight [N, K]^T is best cut, where its reader adds them up; 1: none."""
        if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype is not x.dtype:
            return 1
        rows, (width, inner) = x.numel() // x.shape[-1], weight.shape
        small = rows <= _MOST_ROWS and width <= _MOST_WIDTH and inner >= _LEAST_INNER and inner % _WHOLE == 0
        return 2 if small and weight.is_contiguous() and x.is_contiguous() else 1

    def parts(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        """x [..., K] weight [N, K]^T as `count` sums, each over a share of K -> [count, ..., N] float32."""
        width, inner, rows = len(weight), x.shape[-1], x.numel() // x.shape[-1]
        share = inner // count
        out = torch.empty((count, *x.shape[:-1], width), dtype=torch.float32, device=x.device)
        one, zero, library, handle = ctypes.c_float(1.0), ctypes.c_float(0.0), self._library, self._handle
        self._take_stream()
        code = library.cublasGemmStridedBatchedEx(
            handle, _TRANSPOSED, _PLAIN, width, rows, share, ctypes.byref(one),
            ctypes.c_void_p(weight.data_ptr()), _TYPES[weight.dtype], inner, ctypes.c_longlong(share),
            ctypes.c_void_p(x.data_ptr()), _TYPES[x.dtype], inner, ctypes.c_longlong(share), ctypes.byref(zero),
            ctypes.c_void_p(out.data_ptr()), _TYPES[out.dtype], width, ctypes.c_longlong(rows * width), count,
            _SUMS_FLOAT32, _DEFAULT_ALGORITHM,
        )  # fmt: skip
        self._require("cublasGemmStridedBatchedEx", code)
        return out

    def _take_stream(self) -> None:
        """Work on torch's current stream, without a workspace."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        self._require("cublasSetStream", self._library.cublasSetStream_v2(self._handle, stream))
        # after the stream, with which a workspace of the library's own comes
        code = self._library.cublasSetWorkspace_v2(self._handle, None, ctypes.c_size_t(0))
        self._require("cublasSetWorkspace", code)

    @staticmethod
    def _require(call: str, code: int) -> None:
        if code != 0:
            raise DeviceError("large products", call, expected="CUBLAS_STATUS_SUCCESS, 0", got=code)
