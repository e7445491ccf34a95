"""Prompt chunks by the CUDA kernels: where each row's state comes from and where it is left."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops._abi import PrefillFlag
from trtllm_replayssm.ops.layer_state import ReplayLayerState
from trtllm_replayssm.ops.native_prefill import NativePrefill
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.step_context import StepContext


class NativePrompts:
    """Between the chunks of a prompt a row's state is a float32 carry of the pools, as with the reference."""

    def __init__(self, pools: StatePools, prefill: NativePrefill) -> None:
        self._pools = pools
        self._prefill = prefill

    def scan(self, ctx: StepContext, layer: int, tokens: dict[str, Tensor]) -> Tensor:
        """tokens by the names of prefill.h -> [B, T, H, P] in the type of the values."""
        state = self._pools.ssm[layer]
        assert isinstance(state, ReplayLayerState)
        flags = [self._flags(ctx, layer, row) for row in range(len(ctx.rows.slot))]
        carry = self._carries(ctx, state, flags)
        out = self._prefill.scan(
            state, self._pools.cursors, ctx.rows, tokens,
            torch.tensor([int(f) for f in flags], dtype=torch.int32, device=ctx.start.device), carry,
        )  # fmt: skip
        for row, flag in enumerate(flags):
            if carry is not None and PrefillFlag.TO_CARRY in flag:
                self._pools.carries.setdefault(int(ctx.rows.slot[row]), {})[layer] = carry[row]
        return out

    def _flags(self, ctx: StepContext, layer: int, row: int) -> PrefillFlag:
        slot, none = int(ctx.rows.slot[row]), PrefillFlag(0)
        if slot < 0 or int(ctx.rows.num_tokens[row]) == 0:
            return none
        carried = layer in self._pools.carries.get(slot, {})
        fresh = not carried and int(ctx.start[row]) == 0
        source = PrefillFlag.FROM_CARRY if carried else PrefillFlag.FROM_ZERO if fresh else none
        return source | (none if bool(ctx.last_chunk[row]) else PrefillFlag.TO_CARRY)

    def _carries(self, ctx: StepContext, state: ReplayLayerState, flags: list[PrefillFlag]) -> Tensor | None:
        """[B, H, P, N] float32 with the states that rows continue from; None when no row has a carry."""
        if not any(f & (PrefillFlag.FROM_CARRY | PrefillFlag.TO_CARRY) for f in flags):
            return None
        shape = state.shape
        carry = torch.empty((len(flags), shape.heads, shape.head_dim, shape.state_dim), device=ctx.start.device)
        for row, flag in enumerate(flags):
            if PrefillFlag.FROM_CARRY in flag:
                carry[row] = self._pools.carries[int(ctx.rows.slot[row])][state.layer]
        return carry
