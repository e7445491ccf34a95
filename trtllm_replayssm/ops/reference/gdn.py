"""Gated DeltaNet: update (plain and speculative in one) and the conventional baseline. Outputs are float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtllm_replayssm.dtypes import FP16_MAX
from trtllm_replayssm.ops.layer_state import ConventionalLayerState, CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.reference.decay_skip import DecaySkip
from trtllm_replayssm.ops.reference.elementwise import sigmoid, softplus
from trtllm_replayssm.ops.reference.flush import begin_step, live_rows, store_checkpoints
from trtllm_replayssm.ops.reference.rows import check_width
from trtllm_replayssm.ops.reference.window import Window, empty_window, load_ring, ring_index, scatter_rows
from trtllm_replayssm.shapes import L2_EPS


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log-decay g, beta), [..., H] float32: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b)."""
    g = -a_log.exp() * softplus(a.float() + dt_bias)
    return g, sigmoid(b.float())


def key_factor(k: Tensor) -> Tensor:
    """1 / sqrt(sum(k^2) + 1e-6) over the last axis, float32."""
    wide = k.float()
    return (wide * wide).sum(-1).add(L2_EPS).rsqrt()


def gdn_update(
    state: ReplayLayerState, cursors: CursorTensors, rows: StepRows, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor, *, skip_below: float | None = None,
) -> Tensor:  # fmt: skip
    """One step (paper, Alg. 4-6): q, k [B, T, G, N] raw and v [B, T, H, P] activation dtype, g, beta [B, T, H] float32
    -> [B, T, H, P] float32, zero beyond a row's tokens. Cursors stay.

    A correction is rounded to float16 before any use, so any split of the tokens into calls stores the same bits.
    skip_below: heads whose checkpoint has decayed to this share or less do without it (`spec.decay_skip`); as that is
    decided once a call, the split then matters.
    """
    width = v.shape[1]
    check_width("gdn_update", state.config, width)
    out = torch.zeros(v.shape, device=v.device)
    if rows.active.numel() == 0:
        return out
    skip = None if skip_below is None else DecaySkip(skip_below, g[rows.active, 0], None)
    begun = begin_step(state, cursors, rows, skip)
    slot, h, source, index, folding = begun.slot, begun.h, begun.source, begun.ring_rows, begun.folding
    window = _committed_window(state, slot, index, h)
    if len(folding):
        committed = _flushed_window(state, window, folding, slot, index, h, source)
        window.value[folding] = committed.value
        folded = committed.fold(source[folding])
    scale = 1.0 / math.sqrt(state.shape.state_dim)
    for s in range(width):
        live = live_rows(rows, s)
        row, place = rows.active[live], h[live] + s
        factor = key_factor(k[row, s])
        keys = k[row, s].float() * factor[..., None]
        window.put(live, place, keys, g[row, s])
        u = _correction(window, source, live, keys, v[row, s].float(), beta[row, s])
        u = u.clamp(-FP16_MAX, FP16_MAX).half()
        window.put_value(live, place, u.float())
        _append(state, slot[live], index[live, place], k[row, s], factor, g[row, s], u, v=v[row, s], beta=beta[row, s])
        query = q[row, s].float() * (key_factor(q[row, s]) * scale)[..., None]
        out[row, s] = window.read_out(source, scatter_rows(query, live, len(slot)))[live]
    if len(folding):
        store_checkpoints(state, cursors, slot[folding], folded, cursors.position[slot[folding]])
    return out


def gdn_fold(state: ReplayLayerState, cursors: CursorTensors, slot: Tensor) -> Tensor:
    """States [A, H, P, N] float32 of the slots [A] with all committed records applied; nothing is stored."""
    index, h = ring_index(state, cursors, slot), cursors.h[slot].long()
    window = _committed_window(state, slot, index, h)
    source = state.checkpoint.load(slot)
    everything = torch.arange(len(slot), device=slot.device)
    return _flushed_window(state, window, everything, slot, index, h, source).fold(source)


def gdn_conventional(
    state: ConventionalLayerState, cursors: CursorTensors, rows: StepRows, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor,
) -> Tensor:  # fmt: skip
    """The baseline step: read the state, update it and write it for every token. Arguments as `gdn_update`."""
    check_width("gdn_conventional", state.config, v.shape[1])
    out = torch.zeros(v.shape, device=v.device)
    entries, repeat = state.states.shape[1], state.shape.heads_per_group
    entry = cursors.origin[rows.active_slot].long()
    current = state.states[rows.active_slot, entry]
    for s in range(v.shape[1]):
        live = live_rows(rows, s)
        row = rows.active[live]
        key = (k[row, s].float() * key_factor(k[row, s])[..., None]).repeat_interleave(repeat, dim=1)
        query = (q[row, s].float() * key_factor(q[row, s])[..., None]).repeat_interleave(repeat, dim=1)
        decayed = g[row, s].exp()[..., None, None] * current[live]
        u = beta[row, s][..., None] * (v[row, s].float() - (decayed * key[:, :, None]).sum(-1))
        updated = decayed + u[..., None] * key[:, :, None]
        out[row, s] = (updated * query[:, :, None]).sum(-1) / math.sqrt(state.shape.state_dim)
        state.states[rows.active_slot[live], (entry[live] + 1 + s) % entries] = updated
        current[live] = updated
    return out


def _committed_window(state: ReplayLayerState, slot: Tensor, index: Tensor, h: Tensor) -> Window:
    assert state.ring_key_factor is not None
    window = empty_window(state, len(slot))
    factor = load_ring(state.ring_key_factor, slot, index, h)
    window.key = load_ring(state.ring_key, slot, index, h) * factor[..., None]
    window.value = load_ring(state.ring_value, slot, index, h)
    window.decay = load_ring(state.ring_decay, slot, index, h)
    window.weight.fill_(1.0)
    return window


def _flushed_window(
    state: ReplayLayerState, window: Window, folding: Tensor, slot: Tensor, index: Tensor, h: Tensor, source: Tensor
) -> Window:
    """The committed records of the rows that fold, corrections derived anew from the high-precision checkpoint when the
    ones in the ring came from a low-precision read (paper, Alg. 6, line 8). Derived ones live for this flush only and
    are not rounded to the ring's float16 (paper, Appendix B.4).
    """
    if not state.config.rederives:
        return window.take(folding)
    assert state.ring_v is not None and state.ring_beta is not None
    committed = h[folding]
    v = load_ring(state.ring_v, slot[folding], index[folding], committed)
    beta = load_ring(state.ring_beta, slot[folding], index[folding], committed)
    derived = empty_window(state, len(folding))
    derived.weight.fill_(1.0)
    everyone = torch.arange(len(folding), device=folding.device)
    for j in range(state.config.window):  # key, decay, v and beta behind the last committed record are zero: so is u
        place = torch.full_like(everyone, j)
        keys = window.key[folding, :, j]
        derived.put(everyone, place, keys, window.decay[folding, :, j])
        u = _correction(derived, source[folding], everyone, keys, v[:, :, j], beta[:, :, j])
        derived.put_value(everyone, place, u)
    return derived


def _correction(window: Window, source: Tensor, rows: Tensor, keys: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """u = beta (v - alpha S k) [A', H, P] float32 of a token per row, whose key and decay are entered (Eq. 9)."""
    recalled = window.read_out(source, scatter_rows(keys, rows, source.shape[0]))[rows]
    return beta[..., None] * (v - recalled)


def _append(
    state: ReplayLayerState, slot: Tensor, ring_row: Tensor, k: Tensor, factor: Tensor, g: Tensor, u: Tensor, *,
    v: Tensor, beta: Tensor,
) -> None:  # fmt: skip
    assert state.ring_key_factor is not None
    state.ring_key[slot, :, ring_row] = k
    state.ring_key_factor[slot, :, ring_row] = factor
    state.ring_decay[slot, :, ring_row] = g
    state.ring_value[slot, :, ring_row] = u
    if state.ring_v is not None and state.ring_beta is not None:
        state.ring_v[slot, :, ring_row] = v
        state.ring_beta[slot, :, ring_row] = beta
