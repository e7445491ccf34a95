"""Causal depthwise convolution with SiLU over a window ring [S, R, C]; row = absolute position mod R.

The window holds pre-activation inputs in the activation dtype, R = K - 1 + T_max, so rollback is a smaller position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import CursorTensors, StepRows
from trtllm_replayssm.ops.reference.elementwise import silu


def conv1d_update(
    window: Tensor, cursors: CursorTensors, rows: StepRows, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """x [B, T, C] activation dtype, weight [C, 1, K] and bias [C] float32 -> [B, T, C] float32; writes the window.

    Serves decode steps and prompt chunks of any length. Zero beyond a row's tokens; taps before position 0 are zero.
    """
    out = torch.zeros(x.shape, device=x.device)
    if rows.active.numel() == 0:
        return out
    slot, count, active = rows.active_slot, rows.active_num_tokens, rows.active
    taps, ring_rows = weight.shape[-1] - 1, window.shape[1]
    position = cursors.position[slot].long()
    offsets = torch.arange(-taps, 0, device=x.device)
    source = position[:, None] + offsets
    history = window[slot[:, None], source.remainder(ring_rows)]
    history = torch.where((source >= 0)[..., None], history, torch.zeros((), dtype=window.dtype, device=x.device))
    tokens = torch.arange(x.shape[1], device=x.device)
    inside = tokens < count[:, None]
    fresh = x[active].to(window.dtype).masked_fill(~inside[..., None], 0)
    sequence = torch.cat([history, fresh], dim=1).float().transpose(1, 2)
    # one tap at a time in a fixed order: a token's sum has the same bits in every split of the tokens
    mixed = sum(sequence[:, :, j : j + x.shape[1]] * weight[:, 0, j, None] for j in range(taps + 1))
    assert isinstance(mixed, Tensor)
    mixed = mixed if bias is None else mixed + bias[:, None]
    answer = silu(mixed).transpose(1, 2)
    out[active] = torch.where(inside[..., None], answer, torch.zeros((), device=x.device))
    if rows.flushes is None:  # only the newest R tokens of a long chunk have a row of their own
        row, token = torch.nonzero(inside & (tokens >= count[:, None] - ring_rows), as_tuple=True)
    else:
        row, token = torch.arange(len(slot), device=x.device)[:, None], tokens[None]
    window[slot[row], (position[row] + token) % ring_rows] = fresh[row, token]
    return out
