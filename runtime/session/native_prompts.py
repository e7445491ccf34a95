"""Prompt chunks by the CUDA kernels: where each row's state comes from and where it is left."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops._abi import PrefillFlag
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.layer_state import ConventionalLayerState, CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.native_prefill import NativePrefill
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.step_context import HostRow, StepContext

_NONE = PrefillFlag(0)


def scanned_state(pools: StatePools) -> tuple[ReplayLayerState, CursorTensors] | None:
    """What the kernels are asked about, and given, in place of a layer's own state; None without a recurrent layer.

    Conventional states are none that the kernels know. All rows of such a pool go from a carry to a carry, so one slot
    that is neither read nor written stands for all of theirs.
    """
    first = next(iter(pools.ssm.values()), None)
    if first is None or isinstance(first, ReplayLayerState):
        return None if first is None else (first, pools.cursors)
    device, act = pools.cursors.position.device, torch_dtype(pools.pool.activation)
    state = ReplayLayerState.allocate(first.shape, ReplayConfig(), first.layer, 1, act, device)
    return state, CursorTensors.allocate(1, device)


class NativePrompts:
    """Between the chunks of a prompt a row's state is a float32 carry of the pools, as with the reference."""

    def __init__(self, pools: StatePools, prefill: NativePrefill) -> None:
        self._pools = pools
        self._prefill = prefill
        self._scanned = scanned_state(pools)
        self._sent: tuple[list[PrefillFlag], Tensor] | None = None

    def scan(self, ctx: StepContext, layer: int, tokens: dict[str, Tensor]) -> Tensor:
        """tokens by the names of prefill.h -> [B, T, H, P] in the type of the values."""
        own = self._pools.ssm[layer]
        flags = [self._flags(row, layer) for row in ctx.on_host]
        carry = self._carries(ctx, layer, flags)
        if isinstance(own, ReplayLayerState):
            state, cursors, rows = own, self._pools.cursors, ctx.rows
        else:
            assert self._scanned is not None, "the pool has this layer"
            (state, cursors), rows = self._scanned, StepRows(ctx.rows.slot.clamp(max=0), ctx.rows.num_tokens)
        out = self._prefill.scan(state, cursors, rows, tokens, self._on_device(flags), carry)
        for i, (row, flag) in enumerate(zip(ctx.on_host, flags, strict=True)):
            if carry is None or PrefillFlag.TO_CARRY not in flag:
                continue
            if isinstance(own, ConventionalLayerState) and row.last_chunk:
                own.states[row.slot, 0] = carry[i]
            else:
                self._pools.carries.setdefault(row.slot, {})[layer] = carry[i]
        return out

    def _flags(self, row: HostRow, layer: int) -> PrefillFlag:
        if row.slot < 0 or row.num_tokens == 0:
            return _NONE
        own = isinstance(self._pools.ssm[layer], ReplayLayerState)
        carried = layer in self._pools.carries.get(row.slot, {}) or (not own and row.start > 0)
        fresh = not carried and row.start == 0
        source = PrefillFlag.FROM_CARRY if carried else PrefillFlag.FROM_ZERO if fresh else _NONE
        return source | (_NONE if own and row.last_chunk else PrefillFlag.TO_CARRY)

    def _on_device(self, flags: list[PrefillFlag]) -> Tensor:
        """[B] int32. Sending them waits for the device, and all layers of a pass have the same."""
        if self._sent is None or self._sent[0] != flags:
            device = self._pools.cursors.position.device
            self._sent = flags, torch.tensor([int(f) for f in flags], dtype=torch.int32, device=device)
        return self._sent[1]

    def _carries(self, ctx: StepContext, layer: int, flags: list[PrefillFlag]) -> Tensor | None:
        """[B, H, P, N] float32 with the states that rows continue from; None when no row has a carry."""
        if not any(f & (PrefillFlag.FROM_CARRY | PrefillFlag.TO_CARRY) for f in flags):
            return None
        own, shape = self._pools.ssm[layer], self._pools.ssm[layer].shape
        carry = torch.empty((len(flags), shape.heads, shape.head_dim, shape.state_dim), device=ctx.start.device)
        for i, (row, flag) in enumerate(zip(ctx.on_host, flags, strict=True)):
            if PrefillFlag.FROM_CARRY in flag:
                known = self._pools.carries.get(row.slot, {}).get(layer)
                if known is None:
                    assert isinstance(own, ConventionalLayerState), "a replay slot without a carry has a checkpoint"
                    known = own.states[row.slot, int(self._pools.cursors.origin[row.slot])]
                carry[i] = known
        return carry
