"""The native choice of tokens from logits: argmax, or a draw by each request's settings."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops import torch_ops
from trtllm_replayssm.ops.native_library import find_library

__all__ = ["argmax", "draw", "likeliest", "serves", "torch_ops"]

_MAX_VOCAB = 1 << 20
_SETTINGS = ("row", "length", "seed", "temperature", "top_k", "top_p", "min_p")


def serves(device: torch.device, vocab: int) -> bool:
    """Whether the kernels choose tokens on this device."""
    return device.type == "cuda" and vocab <= _MAX_VOCAB and find_library() is not None


def draw(logits: Tensor, row: Tensor, settings: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] float32 on CUDA and entries of settings [B] int64 -> tokens [B, T] int64, finite [B, T] int32.

    settings [S + 1] by name: length, seed, top_k int64, temperature (0: argmax), top_p, min_p float32; what they and
    finite mean is in plugins/include/replayssm/draw.h. Position t draws for absolute position length + t. Nothing waits
    for the device.
    """
    return _run(logits, row=row, **settings)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] float32 on CUDA -> the lowest id of the largest [B, T] int64, of NaN where there is any, and
    finite [B, T] int32: 0 where that logit is no finite number. Nothing waits for the device.
    """
    return _run(logits, **dict.fromkeys(_SETTINGS))


def likeliest(logits: Tensor) -> Tensor:
    """The tokens of `argmax`, by torch where no kernel serves: logits [B, T, V] float32 anywhere -> [B, T] int64."""
    return argmax(logits)[0] if serves(logits.device, logits.shape[-1]) else logits.argmax(-1)


def _run(logits: Tensor, **settings: Tensor | None) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    finite = torch.empty(logits.shape[:2], dtype=torch.int32, device=logits.device)
    torch.ops.replayssm.draw(flags=0, logits=logits, **settings, tokens=tokens, finite=finite)
    return tokens, finite
