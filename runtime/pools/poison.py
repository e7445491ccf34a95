"""Debug aid: fill every element that nobody may read with NaN (registers: the smallest integer), so that a wrong read
shows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import ConventionalLayerState, ReplayLayerState
from trtllm_replayssm.runtime.pools.state_pools import StatePools


def poison_dead_memory(pools: StatePools) -> None:
    """Poison free slots and their registers, and of used ones ring records outside the committed range, dead
    convolution rows, snapshots that are not current and KV beyond the position.
    """
    used = pools.slots.used
    for slot in range(pools.pool.slots):
        if slot in used:
            _poison_used(pools, slot)
        else:
            _poison_free(pools, slot)


def _poison_free(pools: StatePools, slot: int) -> None:
    for state in pools.ssm.values():
        for tensor in state.tensors():
            _fill_nan(tensor, slot)
    for window in pools.windows.values():
        _fill_nan(window, slot)
    for kv in pools.kv.values():
        for tensor in kv.tensors():
            _fill_nan(tensor, slot)
    for register in pools.cursors.tensors():
        register[slot] = torch.iinfo(register.dtype).min


def _poison_used(pools: StatePools, slot: int) -> None:
    cursors = pools.cursors
    origin, h, position = int(cursors.origin[slot]), int(cursors.h[slot]), int(cursors.position[slot])
    for state in pools.ssm.values():
        if isinstance(state, ReplayLayerState):
            rows = state.config.ring_rows
            dead = [(origin + i) % rows for i in range(h, rows)]
            for ring in state.ring_tensors():
                ring[slot, :, dead] = float("nan")
        elif isinstance(state, ConventionalLayerState):
            state.states[slot, [i for i in range(state.states.shape[1]) if i != origin]] = float("nan")
    taps = pools.geometry.ssm.conv_kernel - 1
    for window in pools.windows.values():
        rows = window.shape[1]
        live = {p % rows for p in range(max(position - taps, 0), position)}
        window[slot, [r for r in range(rows) if r not in live]] = float("nan")
    main = set(pools.geometry.kv_layers[: len(pools.geometry.kv_layers) - _num_mtp(pools)])
    for layer, kv in pools.kv.items():
        # drafting writes the MTP head's cache past the committed position, to be read until the next commit
        if layer in main:
            kv.keys[slot, :, position:] = float("nan")
            kv.values[slot, :, position:] = float("nan")


def _num_mtp(pools: StatePools) -> int:
    return sum(layer >= len(pools.geometry.layers) for layer in pools.geometry.kv_layers)


def _fill_nan(tensor: Tensor, slot: int) -> None:
    if tensor.dtype is torch.float8_e4m3fn:
        tensor.view(torch.uint8)[slot] = 0x7F  # the E4M3 NaN
    elif tensor.is_floating_point():
        tensor[slot] = float("nan")
    else:
        tensor[slot] = 0xFF
