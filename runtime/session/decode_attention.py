"""Attention over the KV slots in plain torch: the new keys and values are written, then every query attends causally.

For devices, types and sizes without kernels (`native_layers`). On CUDA nothing waits for the device, so that a step can
be captured: all rows at once go against the whole caches. Elsewhere rows go one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.runtime.pools.kv_pool import KvLayer


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, *, slot: Tensor, start: Tensor, num_tokens: Tensor
) -> Tensor:
    """q [B, T, Hq, D], k, v [B, T, Hkv, D], slot, start, num_tokens [B] integers -> [B, T, Hq * D].

    Token i of row b, i < num_tokens[b], lies at position start[b] + i of slot[b] and sees the positions up to its own.
    Rows of slot -1 and tokens beyond num_tokens give zeros and change no position that means anything.
    Requires start + T <= depth for every row. No host synchronisation on CUDA.
    """
    attend = attend_masked if q.is_cuda else attend_rows
    return attend(q, k, v, kv, slot=slot, start=start, num_tokens=num_tokens)


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


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, *, slot: Tensor, start: Tensor, num_tokens: Tensor
) -> Tensor:
    """As `decode_attention`, row by row, for chunks of any length; reads the rows' numbers on the host."""
    for row, place, first, n in _present(slot, start, num_tokens):
        kv.keys[place, :, first : first + n] = k[row, :n].transpose(0, 1)
        kv.values[place, :, first : first + n] = v[row, :n].transpose(0, 1)
    return attend_caches(q, kv, slot=slot, start=start, num_tokens=num_tokens)


def attend_caches(q: Tensor, kv: KvLayer, *, slot: Tensor, start: Tensor, num_tokens: Tensor) -> Tensor:
    """The second half of `attend_rows`: the caches hold the new keys and values already."""
    out = torch.zeros_like(q)
    for row, place, first, n in _present(slot, start, num_tokens):
        keys, values = kv.keys[place, :, : first + n], kv.values[place, :, : first + n]
        positions = torch.arange(first + n, device=q.device)
        # a chunk that begins its sequence needs no mask in memory
        seen = positions <= positions[first:, None] if first else None
        answer = functional.scaled_dot_product_attention(
            q[row, :n].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, is_causal=seen is None,
            enable_gqa=True,
        )  # fmt: skip
        out[row, :n] = answer[0].transpose(0, 1)
    return out.flatten(-2)


def _present(slot: Tensor, start: Tensor, num_tokens: Tensor) -> list[tuple[int, int, int, int]]:
    """Row, slot, start and number of tokens of the rows that have any."""
    rows = zip(slot.tolist(), start.tolist(), num_tokens.tolist(), strict=True)
    return [(row, place, first, n) for row, (place, first, n) in enumerate(rows) if place >= 0 and n > 0]
