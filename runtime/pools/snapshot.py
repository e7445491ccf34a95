"""A slot's whole state in host memory: taken on preemption or for a fork, valid for any slot of an equal pool."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """position: committed tokens absorbed; signature: shape of the pool; tensors: named rows of the slot, on the host.

    carry: unrounded float32 states of a prompt in progress, by layer; empty otherwise.
    """

    position: int
    signature: str
    tensors: dict[str, Tensor]
    carry: dict[int, Tensor]

    @property
    def nbytes(self) -> int:
        """Host memory the tensors occupy."""
        return sum(t.numel() * t.element_size() for t in (*self.tensors.values(), *self.carry.values()))
