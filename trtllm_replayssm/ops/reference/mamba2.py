"""Mamba-2: update (plain and speculative in one) and the conventional baseline. Outputs are float32 with D skip."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import ConventionalLayerState, CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.reference.decay_skip import DecaySkip
from trtllm_replayssm.ops.reference.elementwise import softplus
from trtllm_replayssm.ops.reference.flush import begin_step, live_rows, store_checkpoints
from trtllm_replayssm.ops.reference.rows import check_width
from trtllm_replayssm.ops.reference.window import Window, empty_window, load_ring, ring_index, scatter_rows


def discretise(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """softplus(dt + dt_bias) in float32, [..., H]; time_step_limit is [0, inf], so nothing is clamped."""
    return softplus(dt.float() + dt_bias)


def mamba2_update(
    state: ReplayLayerState, cursors: CursorTensors, rows: StepRows, x: Tensor, k: Tensor, q: Tensor, dt: Tensor,
    a: Tensor, *, d_skip: Tensor, skip_below: float | None = None,
) -> Tensor:  # fmt: skip
    """One step (paper, Alg. 1-3): x [B, T, H, P], k, q [B, T, G, N] activation dtype, dt [B, T, H] float32 after
    softplus, a = -exp(A_log) [H], d_skip [H] -> [B, T, H, P] float32, zero beyond a row's tokens. Cursors stay.

    skip_below: heads whose checkpoint has decayed to this share or less do without it (`spec.decay_skip`).
    """
    width = x.shape[1]
    check_width("mamba2_update", state.config, width)
    out = torch.zeros(x.shape, device=x.device)
    if rows.active.numel() == 0:
        return out
    skip = None if skip_below is None else DecaySkip(skip_below, (dt[:, 0] * a)[rows.active], a)
    begun = begin_step(state, cursors, rows, skip)
    slot, h, source, index, folding = begun.slot, begun.h, begun.source, begun.ring_rows, begun.folding
    window = _committed_window(state, slot, index, h, a)
    if len(folding):
        folded = window.take(folding).fold(source[folding])
    for s in range(width):
        live = live_rows(rows, s)
        if live.numel() == 0:
            break
        row, place = rows.active[live], h[live] + s
        window.put(live, place, k[row, s].float(), dt[row, s] * a)
        window.put_value(live, place, x[row, s].float(), dt[row, s])
        ring_row = index[live, place]
        state.ring_key[slot[live], :, ring_row] = k[row, s]
        state.ring_value[slot[live], :, ring_row] = x[row, s].to(state.ring_value.dtype)
        state.ring_decay[slot[live], :, ring_row] = dt[row, s]
        answer = window.read_out(source, scatter_rows(q[row, s].float(), live, len(slot)))
        out[row, s] = answer[live] + d_skip[:, None] * x[row, s].float()
    if len(folding):
        store_checkpoints(state, cursors, slot[folding], folded, cursors.position[slot[folding]])
    return out


def mamba2_fold(state: ReplayLayerState, cursors: CursorTensors, slot: Tensor, a: Tensor) -> Tensor:
    """States [A, H, P, N] float32 of the slots [A] with all committed records applied; nothing is stored."""
    index = ring_index(state, cursors, slot)
    window = _committed_window(state, slot, index, cursors.h[slot].long(), a)
    return window.fold(state.checkpoint.load(slot))


def mamba2_conventional(
    state: ConventionalLayerState, cursors: CursorTensors, rows: StepRows, x: Tensor, k: Tensor, q: Tensor, dt: Tensor,
    a: Tensor, *, d_skip: Tensor,
) -> Tensor:  # fmt: skip
    """The baseline step: read the state, update it and write it for every token. Arguments as `mamba2_update`."""
    check_width("mamba2_conventional", state.config, x.shape[1])
    out = torch.zeros(x.shape, device=x.device)
    entries, repeat = state.states.shape[1], state.shape.heads_per_group
    entry = cursors.origin[rows.active_slot].long()
    current = state.states[rows.active_slot, entry]
    for s in range(x.shape[1]):
        live = live_rows(rows, s)
        row = rows.active[live]
        key = k[row, s].float().repeat_interleave(repeat, dim=1)
        value = x[row, s].float() * dt[row, s][..., None]
        decay = (dt[row, s] * a).exp()[..., None, None]
        updated = decay * current[live] + value[..., None] * key[:, :, None]
        query = q[row, s].float().repeat_interleave(repeat, dim=1)
        out[row, s] = (updated * query[:, :, None]).sum(-1) + d_skip[:, None] * x[row, s].float()
        state.states[rows.active_slot[live], (entry[live] + 1 + s) % entries] = updated
        current[live] = updated
    return out


def _committed_window(state: ReplayLayerState, slot: Tensor, index: Tensor, h: Tensor, a: Tensor) -> Window:
    window = empty_window(state, len(slot))
    window.key = load_ring(state.ring_key, slot, index, h)
    window.value = load_ring(state.ring_value, slot, index, h)
    window.weight = load_ring(state.ring_decay, slot, index, h)
    # dt = 0 outside the committed range; 0 * a would be NaN for an infinite rate, so mask the product too
    window.decay = torch.where(window.weight > 0, window.weight * a[:, None], torch.zeros((), device=a.device))
    return window
