"""Attention over the KV slots in plain torch: the new keys and values are written, then every query attends causally.

For devices, types and sizes without kernels (`native_layers`). On CUDA nothing waits for the device, so that a step can
be captured: all rows at once go against the whole caches. Elsewhere rows go one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from trtllm_replayssm.runtime.pools.kv_pool import KvLayer
from trtllm_replayssm.runtime.session.step_context import HostRow

# without cuDNN's, which plans anew for every length that it has not seen
_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, *, slot: Tensor, start: Tensor, num_tokens: Tensor
) -> Tensor:
    """q [B, T, Hq, D], k, v [B, T, Hkv, D], slot, start, num_tokens [B] integers -> [B, T, Hq * D].

    Token i of row b, i < num_tokens[b], lies at position start[b] + i of slot[b] and sees the positions up to its own.
    Rows of slot -1 and tokens beyond num_tokens give zeros and change no position that means anything.
    Requires start + T <= depth for every row. No host synchronisation on CUDA.
    """
    if q.is_cuda:
        return attend_masked(q, k, v, kv, slot=slot, start=start, num_tokens=num_tokens)
    table = zip(slot.tolist(), num_tokens.tolist(), start.tolist(), strict=True)
    return attend_rows(q, k, v, kv, [HostRow(*numbers, last_chunk=False) for numbers in table])


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, *, slot: Tensor, start: Tensor, num_tokens: Tensor
) -> Tensor:
    """As `decode_attention`, in any type: all rows against whole caches, whatever is in use of them."""
    rows, tokens, heads, size = q.shape
    kv_heads, depth = kv.keys.shape[1:3]
    steps = torch.arange(tokens, device=q.device)
    exists = (steps < num_tokens[:, None]) & (slot >= 0)[:, None]
    home, first = slot.long().clamp(min=0), start.long()
    # tokens that do not exist: zeros, at the last position of a cache, which no token that counts ever has
    place = torch.where(exists, first[:, None] + steps, depth - 1)
    for cache, new in ((kv.keys, k), (kv.values, v)):
        cache[home[:, None], :, place] = new.masked_fill(~exists[..., None, None], 0)
    places = torch.arange(depth, device=q.device)
    seen = places <= place[..., None]
    grouped = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, Hq / Hkv * T, D]
    scores = (grouped @ kv.keys[home].transpose(-1, -2)).unflatten(2, (-1, tokens)) * size**-0.5
    weights = scores.float().masked_fill(~seen[:, None, None], float("-inf")).softmax(-1).to(q.dtype)
    # what lies behind a row's tokens may be anything, and zero times NaN is NaN
    behind = places >= (first + num_tokens)[:, None]
    values = kv.values[home].masked_fill(behind[:, None, :, None], 0)
    out: Tensor = (weights.flatten(2, 3) @ values).unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4)
    return out.masked_fill(~exists[..., None, None, None], 0).reshape(rows, tokens, heads * size)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, rows: Sequence[HostRow]) -> Tensor:
    """As `decode_attention`, row by row, for chunks of any length."""
    for row, at in enumerate(rows):
        if at.slot >= 0:
            kv.keys[at.slot, :, at.start : at.start + at.num_tokens] = k[row, : at.num_tokens].transpose(0, 1)
            kv.values[at.slot, :, at.start : at.start + at.num_tokens] = v[row, : at.num_tokens].transpose(0, 1)
    return attend_caches(q, kv, rows)


def attend_caches(q: Tensor, kv: KvLayer, rows: Sequence[HostRow]) -> Tensor:
    """The second half of `attend_rows`: the caches hold the new keys and values already."""
    out = torch.zeros_like(q)
    for row, at in enumerate(rows):
        if at.slot < 0 or at.num_tokens == 0:
            continue
        end = at.start + at.num_tokens
        keys, values = kv.keys[at.slot, :, :end], kv.values[at.slot, :, :end]
        # a chunk that begins its sequence needs no mask in memory
        positions = torch.arange(end, device=q.device) if at.start else None
        seen = None if positions is None else positions <= positions[at.start :, None]
        with sdpa_kernel(list(_BACKENDS)):
            answer = functional.scaled_dot_product_attention(
                q[row, : at.num_tokens].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen,
                is_causal=seen is None, enable_gqa=True,
            )  # fmt: skip
        out[row, : at.num_tokens] = answer[0].transpose(0, 1)
    return out.flatten(-2)
