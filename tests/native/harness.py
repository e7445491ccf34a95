"""What the GPU tests of the native library share: finding it, torch tensors as views, a pool of layer state.

The library is taken from the environment variable REPLAYSSM_NATIVE_LIBRARY, default build/native/libreplayssm.so.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.launches import UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind, SsmShape

LIBRARY = Path(
    os.environ.get(
        "REPLAYSSM_NATIVE_LIBRARY", Path(__file__).resolve().parents[2] / "build" / "native" / "libreplayssm.so"
    )
)


def unavailable() -> str | None:
    """Why the GPU tests cannot run here, in one line, or None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if LIBRARY.exists() else f"no native library at {LIBRARY}"


def view(tensor: Any) -> _abi.Tensor:
    """A torch tensor as an ABI view."""
    import torch

    codes = {
        torch.float32: _abi.Dtype.FLOAT32,
        torch.float16: _abi.Dtype.FLOAT16,
        torch.bfloat16: _abi.Dtype.BFLOAT16,
        torch.int32: _abi.Dtype.INT32,
        torch.int64: _abi.Dtype.INT64,
    }
    return _abi.tensor(tensor.data_ptr(), codes[tensor.dtype], tensor.shape, tensor.stride())


@dataclass
class Pool:
    """One layer's state of `slots` sequences on the device, poisoned with NaN, and the calls over it.

    checkpoint [S, H, P, N] float32; ring_value [S, H, C, P] act (GDN: float16), ring_k [S, G, C, N] act;
    ring_dt [S, H, C] float32; GDN also ring_key_factor [S, G, C] float32; origin, h, position [S] int32.
    """

    shape: SsmShape
    config: ReplayConfig
    slots: int
    act: Any
    native: _abi.Library
    device: str = "cuda"
    tensors: dict[str, Any] = field(default_factory=dict)
    workspace: Any = None
    launch: UpdateLaunch | None = None  # asked of the library, instead of its own choice
    flags: int = 0  # of every update, beside those of the call

    def __post_init__(self) -> None:
        import torch

        s, c = self.shape, self.config.ring_rows
        self.workspace = torch.zeros(256, dtype=torch.uint8, device=self.device)

        gdn = s.kind is SsmKind.GDN

        def poison(*size: int, dtype: Any) -> Any:
            return torch.full(size, float("nan"), dtype=dtype, device=self.device)

        def zeros(dtype: Any) -> Any:
            return torch.zeros(self.slots, dtype=dtype, device=self.device)

        self.tensors = {
            "checkpoint": poison(self.slots, s.heads, s.head_dim, s.state_dim, dtype=torch.float32),
            "ring_value": poison(self.slots, s.heads, c, s.head_dim, dtype=torch.float16 if gdn else self.act),
            "ring_k": poison(self.slots, s.groups, c, s.state_dim, dtype=self.act),
            "ring_dt": poison(self.slots, s.heads, c, dtype=torch.float32),
            "origin": zeros(torch.int32),
            "h": zeros(torch.int32),
            "position": zeros(torch.int32),
        }
        if gdn:
            self.tensors["ring_key_factor"] = poison(self.slots, s.groups, c, dtype=torch.float32)

    def admit(self, slot: int, state: np.ndarray[Any, Any], origin: int = 0) -> None:
        """Give `slot` to a sequence whose state [H, P, N] is known, as a prefill would."""
        import torch

        self.tensors["checkpoint"][slot] = torch.from_numpy(state.astype(np.float32))
        for name, value in (("origin", origin), ("h", 0), ("position", 0)):
            self.tensors[name][slot] = value

    def update(self, rows: dict[str, Any], out: Any, flags: int = 0) -> None:
        """rows: slot, num_tokens [B] int32; value, k, q and dt, a, skip (GDN: log_decay, beta); out is written."""
        args = _abi.UpdateArgs(
            kind=int(_abi.Kind.MAMBA2 if self.shape.kind is SsmKind.MAMBA2 else _abi.Kind.GDN),
            window=self.config.window,
            flags=flags | self.flags,
            launch=_abi.LaunchConstants(*([] if self.launch is None else self.launch.numbers)),
            out=view(out),
            **{name: view(tensor) for name, tensor in rows.items()},
            **{name: view(tensor) for name, tensor in self.tensors.items()},
        )
        self.native.update(args, self.workspace.data_ptr(), self.workspace.numel(), self._stream())

    def commit(self, slot: Any, num_tokens: Any, accepted: Any) -> None:
        """Move the cursors; all arguments [B] int32."""
        args = _abi.CommitArgs(
            window=self.config.window,
            ring_rows=self.config.ring_rows,
            slot=view(slot),
            num_tokens=view(num_tokens),
            accepted=view(accepted),
            **{name: view(self.tensors[name]) for name in ("origin", "h", "position")},
        )
        self.native.commit(args, self._stream())

    @staticmethod
    def _stream() -> int:
        import torch

        return int(torch.cuda.current_stream().cuda_stream)
