"""One place for the logits of all recorded work of a session."""

from __future__ import annotations

import torch
from torch import Tensor


class LogitsBuffer:
    """[rows, V] float32 outside the graphs' memory, made when first needed; each piece of work overwrites the last."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._sizes, self._device = (rows, vocab), device
        self._buffer: Tensor | None = None

    def keep(self, logits: Tensor) -> Tensor:
        """Copy logits [..., V] of at most `rows` rows -> the copy, in the same shape."""
        if self._buffer is None:
            self._buffer = torch.empty(self._sizes, device=self._device)
        kept = self._buffer[: logits[..., 0].numel()].view(logits.shape)
        return kept.copy_(logits)
