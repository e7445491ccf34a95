"""Prompt chunks by the CUDA kernels: where each row's state comes from and where it is left."""

from __future__ import annotations

from itertools import accumulate

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
_CARRIED = PrefillFlag.FROM_CARRY | PrefillFlag.TO_CARRY


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
        """tokens by the names of prefill.h -> [B, T, H, P] in the type of the values.

        A pass that fails leaves carries that are not whole.
        """
        own = self._pools.ssm[layer]
        flags = [self._flags(row, layer) for row in ctx.on_host]
        carried = [i for i, flag in enumerate(flags) if flag & _CARRIED]
        carry = self._carries([ctx.on_host[i] for i in carried], [flags[i] for i in carried], layer)
        if isinstance(own, ReplayLayerState):
            state, cursors, rows = own, self._pools.cursors, ctx.rows
        else:
            assert self._scanned is not None, "the pool has this layer"
            (state, cursors), rows = self._scanned, StepRows(ctx.rows.slot.clamp(max=0), ctx.rows.num_tokens)
        row_flags, index = self._on_device(flags)
        out = self._prefill.scan(state, cursors, rows, tokens, row_flags, carry, None if carry is None else index)
        for place, i in enumerate(carried):
            row = ctx.on_host[i]
            if carry is None or PrefillFlag.TO_CARRY not in flags[i]:
                continue
            if isinstance(own, ConventionalLayerState) and row.last_chunk:
                own.states[row.slot, 0] = carry[place]
            else:  # memory of its own: a view would keep the states of all rows of the pass
                self._pools.carries.setdefault(row.slot, {})[layer] = carry[place].clone()
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
        """[2, B] int32: flags, and each row's place among those with a carry, which means nothing for others.

        Sending them waits for the device, and all layers of a pass have the same.
        """
        if self._sent is None or self._sent[0] != flags:
            device = self._pools.cursors.position.device
            before = accumulate((int(bool(flag & _CARRIED)) for flag in flags[:-1]), initial=0)
            self._sent = flags, torch.tensor([list(map(int, flags)), list(before)], dtype=torch.int32, device=device)
        return self._sent[1]

    def _carries(self, rows: list[HostRow], flags: list[PrefillFlag], layer: int) -> Tensor | None:
        """[K, H, P, N] float32 with the states that rows with a carry continue from; None without such a row.

        What was carried to them is given up for it: memory that the states after the chunk can take.
        """
        if not rows:
            return None
        own, shape = self._pools.ssm[layer], self._pools.ssm[layer].shape
        carry = torch.empty(
            (len(rows), shape.heads, shape.head_dim, shape.state_dim), device=self._pools.cursors.position.device
        )
        for place, (row, flag) in enumerate(zip(rows, flags, strict=True)):
            if PrefillFlag.FROM_CARRY in flag:
                known = self._pools.carries.get(row.slot, {}).pop(layer, None)
                if known is None:
                    assert isinstance(own, ConventionalLayerState), "a replay slot without a carry has a checkpoint"
                    known = own.states[row.slot, int(self._pools.cursors.origin[row.slot])]
                carry[place] = known
        return carry
