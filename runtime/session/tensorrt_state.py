"""The pools by the names that an engine with plugins binds: cursors, recurrent states, windows, prompts in progress.

A prompt in progress has its float32 states in `StatePools.carries`, as every session keeps them; an engine reads and
writes them in one row per layer, into which they are moved and from which they are taken around a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm.bindings import CURSORS, layer_tensor, ssm_tensors
from trtllm_replayssm.ops.layer_state import ReplayLayerState
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.runtime.pools.state_pools import StatePools

FROM_ZERO, FROM_CARRY, TO_CARRY = 1, 2, 4  # RSSM_PREFILL_* of include/replayssm/prefill.h


@dataclass(frozen=True, slots=True)
class PluginState:
    """tensors: by binding name, each the pool's own memory, and the experts; carries: layer -> [1, H, P, N] float32."""

    tensors: dict[str, Tensor]
    carries: dict[int, Tensor]

    @staticmethod
    def of(pools: StatePools, experts: Mapping[str, NDArray[Any]]) -> PluginState:
        """Bind the pools of a session; experts: by binding name, copied to the pools' device."""
        device = pools.cursors.position.device
        tensors = {name: _uploaded(array, device) for name, array in experts.items()}
        tensors |= dict(zip(CURSORS, pools.cursors.tensors(), strict=True))
        carries = {}
        for layer, state in pools.ssm.items():
            assert isinstance(state, ReplayLayerState)
            shape = state.shape
            sizes = (1, shape.heads, shape.head_dim, shape.state_dim)
            carries[layer] = torch.zeros(sizes, device=device)
            specs = ssm_tensors(shape, state.config, layer, pools.pool.activation.value)
            parts = [*_layer_tensors(state), carries[layer]]
            tensors.update({spec.name: part for spec, part in zip(specs, parts, strict=True)})
            tensors[layer_tensor(layer, "window")] = pools.windows[layer]
        return PluginState(tensors, carries)

    def begin_chunk(self, pools: StatePools, slot: int, *, last: bool) -> int:
        """Move the slot's unfinished states into place -> the flags of its row."""
        carried = pools.carries.pop(slot, None)
        flags = 0 if last else TO_CARRY
        if carried is None:
            return flags | (FROM_ZERO if int(pools.cursors.position[slot]) == 0 else 0)
        for layer, row in self.carries.items():
            row[0].copy_(carried[layer])
        return flags | FROM_CARRY

    def end_chunk(self, pools: StatePools, slot: int, *, last: bool) -> None:
        """Keep the states of a prompt that goes on."""
        if not last:
            pools.carries[slot] = {layer: row[0].clone() for layer, row in self.carries.items()}


def _uploaded(array: NDArray[Any], device: torch.device) -> Tensor:
    """A stack [E, ...] on the device; one expert at a time, so that a mapped file is never whole in memory."""
    kind = {"int8": torch.int8, "float32": torch.float32}[array.dtype.name]
    tensor = torch.empty(array.shape, dtype=kind, device=device)
    for expert in range(len(array)):
        tensor[expert].copy_(torch.from_numpy(np.array(array[expert])))
    return tensor


def _layer_tensors(state: ReplayLayerState) -> list[Tensor]:
    """In the order of `bindings.ssm_tensors`, without the carry."""
    read = [] if state.read_copy is None else _copy_tensors(state.read_copy)
    return [*_copy_tensors(state.checkpoint), *read, *state.ring_tensors()]


def _copy_tensors(copy: StateStore) -> list[Tensor]:
    """Packed elements travel as signed bytes."""
    return [t.view(torch.int8) if t.dtype is torch.uint8 else t for t in copy.tensors()]
