"""What the device knows of each slot's request between two steps: next inputs, limits, settings, its own text.

One row per slot and one more, the last, which padding rows read and write instead: no step needs a branch for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm.runtime.device.entry import MAX_STOP_IDS, DeviceEntry
from trtllm_replayssm.runtime.device.philox import signed64

BLOCK = 1024  # tokens of the vocabulary that are summed together
SMALLEST_TEMPERATURE = 1e-30  # anything below draws the best token just as well, and float32 can divide by this
SMALLEST_TOP_P = 1e-30  # anything below keeps the best token alone just as well; 0 in float32 would keep none
LARGEST_TOP_K = (1 << 31) - 1  # beyond every vocabulary, and within the register's type


def whole_blocks(vocab: int) -> int:
    """The vocabulary filled up to whole blocks."""
    return -(-vocab // BLOCK) * BLOCK


@dataclass(frozen=True)
class Registers:
    """S slots, D drafts a step at most, M positions of a slot.

    last [S + 1] int64: the next step's base token. length [S + 1] int64: tokens of prompt and output, `last` included,
    which is the absolute position of the next emitted token. room [S + 1] int64: output tokens still allowed, 0 for a
    request that has ended. stop_ids [S + 1, MAX_STOP_IDS] int64, filled up with -1. draft [S + 1, D] int64 and
    draft_count [S + 1] int64: the next step's drafts. draft_weights [S + 1, D, V up to a block] float32: the
    probabilities that those of sampled requests were drawn from; no columns where drafts are not drawn. history
    [S + 1, M + 1 + D] int64: the first `length` are the request's tokens, what lies behind them means nothing; one
    column where nobody looks tokens up. seed, top_k [S + 1] int64; temperature (0: greedy), top_p, min_p [S + 1]
    float32.
    """

    last: Tensor
    length: Tensor
    room: Tensor
    stop_ids: Tensor
    draft: Tensor
    draft_count: Tensor
    draft_weights: Tensor
    history: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @staticmethod
    def allocate(slots: int, drafts: int, positions: int, device: torch.device, *, drawn_vocab: int = 0) -> Registers:
        """All rows ended. positions: of a slot, 0 to keep no history. drawn_vocab: V where drafts are drawn."""

        def integers(*sizes: int) -> Tensor:
            return torch.zeros((slots + 1, *sizes), dtype=torch.int64, device=device)

        def numbers(value: float) -> Tensor:
            return torch.full((slots + 1,), value, device=device)

        return Registers(
            last=integers(), length=integers(), room=integers(), stop_ids=integers(MAX_STOP_IDS) - 1,
            draft=integers(drafts), draft_count=integers(),
            draft_weights=torch.zeros((slots + 1, drafts, whole_blocks(drawn_vocab)), device=device),
            history=integers(positions + 1 + drafts if positions else 1),
            seed=integers(), temperature=numbers(0.0), top_k=integers(), top_p=numbers(1.0), min_p=numbers(0.0),
        )  # fmt: skip

    @property
    def keeps_history(self) -> bool:
        """Whether the requests' tokens are kept."""
        return self.history.shape[1] > 1

    def greedy(self, row: Tensor) -> Tensor:
        """[B] bool: whether the requests of register rows [B] take the argmax."""
        return self.temperature[row] == 0

    def draft_room(self, row: Tensor) -> Tensor:
        """[B] int64: drafts that register rows [B] may have: a step emits one token more than it drafts."""
        return (self.room[row] - 1).clamp(min=0)

    def settings(self) -> dict[str, Tensor]:
        """What a draw reads, by the names of `ops.native_draw.draw`."""
        names = ("length", "seed", "temperature", "top_k", "top_p", "min_p")
        return {name: getattr(self, name) for name in names}

    def rows(self, slot: Tensor) -> Tensor:
        """Register rows [B] int64 of slots [B]; the last one for padding (-1)."""
        return torch.where(slot < 0, self.last.shape[0] - 1, slot).long()

    def enter(self, entries: Sequence[DeviceEntry]) -> None:
        """Set the rows of these requests. Copies without waiting for the device."""
        row = self._sent([e.slot for e in entries], torch.int64)
        columns: list[tuple[Tensor, Sequence[float]]] = [
            (self.last, [e.tokens[-1] for e in entries]), (self.length, [len(e.tokens) for e in entries]),
            (self.room, [e.room for e in entries]),
            (self.draft_count, [len(e.drafts) for e in entries]), (self.seed, [signed64(e.seed) for e in entries]),
            (self.top_k, [min(e.top_k, LARGEST_TOP_K) for e in entries]),
            (self.temperature, [0.0 if e.greedy else max(e.temperature, SMALLEST_TEMPERATURE) for e in entries]),
            (self.top_p, [max(e.top_p, SMALLEST_TOP_P) for e in entries]), (self.min_p, [e.min_p for e in entries]),
        ]  # fmt: skip
        for register, values in columns:
            register.index_copy_(0, row, self._sent(values, register.dtype))
        stops = [[*e.stop_ids, *[-1] * (MAX_STOP_IDS - len(e.stop_ids))] for e in entries]
        self.stop_ids.index_copy_(0, row, self._sent(stops, torch.int64))
        if self.draft.shape[1]:
            drafts = [[*e.drafts, *[0] * (self.draft.shape[1] - len(e.drafts))] for e in entries]
            self.draft.index_copy_(0, row, self._sent(drafts, torch.int64))
        if self.draft_weights.shape[2]:
            for entry in entries:
                if entry.q is not None:
                    weights = self.draft_weights[entry.slot, : len(entry.drafts), : entry.q.shape[1]]
                    weights.copy_(self._sent(entry.q, torch.float32))
        if self.keeps_history:
            for entry in entries:
                self.history[entry.slot, : len(entry.tokens)].copy_(self._sent(entry.tokens, torch.int64))

    def _sent(self, values: Sequence[object] | NDArray[np.float64], dtype: torch.dtype) -> Tensor:
        """Values on the device; from pinned memory, so that the host does not wait."""
        host, device = torch.tensor(values, dtype=dtype), self.last.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
