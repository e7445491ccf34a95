"""Rounds float32 checkpoints as a pool of another format would have stored them, after each write.

For formats of the recurrence that no kernel keeps: the kernels run with float32 checkpoints, and every checkpoint that
a prompt or a flush has written is replaced by what its format makes of it. With one copy for reads and recurrence that
is the pool of that format, number for number for Mamba-2. A GDN flush folds the corrections of its ring instead of
deriving them anew from the same checkpoint: they differ by their rounding to float16, the states in a few codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding
from trtllm_replayssm.ops.layer_state import ReplayLayerState
from trtllm_replayssm.ops.reference.philox import state_words
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.runtime.pools.state_pools import StatePools


class RoundingPass:
    """Over all recurrent layers of some slots at once."""

    def __init__(self, pools: StatePools, config: ReplayConfig, slots: Sequence[int]) -> None:
        """config: the pool that is stood in for, without a read copy; pools: of float32 checkpoints."""
        self._layers = [state for state in pools.ssm.values() if isinstance(state, ReplayLayerState)]
        device, self._rounding, self._shape = pools.cursors.seed.device, config.recurrence_rounding, pools.geometry.ssm
        rows = len(self._layers) * len(slots)
        self._slots = torch.tensor(slots, device=device)
        self._seed = pools.cursors.seed
        self._layer = torch.tensor([s.layer for s in self._layers], device=device).repeat_interleave(len(slots))
        self._places = torch.arange(rows, device=device)
        self._store = StateStore.allocate(config.recurrence, self._shape, rows, device)

    def apply(self, absorbed: Tensor) -> None:
        """Round the slots' checkpoints, which have absorbed [rows] tokens each. Nothing is read back."""
        states = torch.cat([state.checkpoint.load(self._slots) for state in self._layers])
        words = None
        if self._rounding is Rounding.STOCHASTIC:
            count, elems = len(self._layers), self._shape.head_dim * self._shape.state_dim
            seed, position = self._seed[self._slots].repeat(count), absorbed.repeat(count)
            words = state_words(seed, self._layer, self._shape.heads, elems, position)
        self._store.store(self._places, states, self._rounding, words)
        rounded = self._store.load(self._places).split(len(self._slots))
        for state, part in zip(self._layers, rounded, strict=True):
            state.checkpoint.data[self._slots] = part
