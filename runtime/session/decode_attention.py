"""Attention of decode steps over the KV slots: the new keys and values are written, then every query attends causally.

On CUDA nothing waits for the device, so that a step can be captured: one flash kernel serves all rows, or, for types
and sizes that it does not take, one masked product over the whole caches. Elsewhere rows go one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.runtime.pools.kv_pool import KvLayer

_FLASH_TYPES = (torch.bfloat16, torch.float16)
_FLASH_MAX_HEAD = 256
_FLASH_HEAD_PIECE = 8


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, *, slot: Tensor, start: Tensor, num_tokens: Tensor
) -> Tensor:
    """q [B, T, Hq, D], k, v [B, T, Hkv, D], slot, start, num_tokens [B] integers -> [B, T, Hq * D].

    Token i of row b, i < num_tokens[b], lies at position start[b] + i of slot[b] and sees the positions up to its own.
    Rows of slot -1 and tokens beyond num_tokens give zeros and change no position that means anything.
    Requires start + T <= depth for every row. No host synchronisation on CUDA.
    """
    if is_captured(q):
        return _flash(q, k, v, kv, slot, start, num_tokens)
    if q.is_cuda:
        return attend_masked(q, k, v, kv, slot=slot, start=start, num_tokens=num_tokens)
    return attend_rows(q, k, v, kv, slot=slot, start=start, num_tokens=num_tokens)


def is_captured(q: Tensor) -> bool:
    """Whether the flash kernel serves queries like these."""
    fits = q.shape[-1] <= _FLASH_MAX_HEAD and q.shape[-1] % _FLASH_HEAD_PIECE == 0
    return q.is_cuda and q.dtype in _FLASH_TYPES and fits


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, *, slot: Tensor, start: Tensor, num_tokens: Tensor
) -> Tensor:
    """As `decode_attention`, in any type: all rows against whole caches, whatever is in use of them."""
    rows, tokens, heads, size = q.shape
    kv_heads, depth = kv.keys.shape[1:3]
    steps = torch.arange(tokens, device=q.device)
    exists = (steps < num_tokens[:, None]) & (slot >= 0)[:, None]
    home, first = slot.long().clamp(min=0), start.long()
    place = torch.where(exists, first[:, None] + steps, depth - 1)  # see `_flash`
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
    out = torch.zeros_like(q)
    for row, (place, first, n) in enumerate(zip(slot.tolist(), start.tolist(), num_tokens.tolist(), strict=True)):
        if place < 0 or n == 0:
            continue
        kv.keys[place, :, first : first + n] = k[row, :n].transpose(0, 1)
        kv.values[place, :, first : first + n] = v[row, :n].transpose(0, 1)
        keys, values = kv.keys[place, :, : first + n], kv.values[place, :, : first + n]
        seen = torch.arange(first + n) <= torch.arange(first, first + n)[:, None]
        answer = functional.scaled_dot_product_attention(
            q[row, :n].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen[None, None].to(q.device),
            enable_gqa=True,
        )  # fmt: skip
        out[row, :n] = answer[0].transpose(0, 1)
    return out.flatten(-2)


def _flash(q: Tensor, k: Tensor, v: Tensor, kv: KvLayer, slot: Tensor, start: Tensor, num_tokens: Tensor) -> Tensor:
    """One varlen flash call: a slot's cache is a stretch of keys whose start is its address, not the last one's end."""
    rows, tokens, heads, size = q.shape
    slots, kv_heads, depth, _ = kv.keys.shape
    steps = torch.arange(tokens, device=q.device)
    exists = (steps < num_tokens[:, None]) & (slot >= 0)[:, None]
    home, first = slot.long().clamp(min=0), start.long()
    # tokens that do not exist: zeros, at the last position of a cache, which no token that counts ever has
    place = torch.where(exists, first[:, None] + steps, depth - 1)
    for cache, new in ((kv.keys, k), (kv.values, v)):
        index = (home[:, None] * kv_heads)[..., None] * depth + place[..., None]
        index = index + torch.arange(kv_heads, device=q.device) * depth
        written = new.masked_fill(~exists[..., None, None], 0)
        cache.view(-1, size)[index.flatten()] = written.reshape(-1, size)
    begins = (home * (kv_heads * depth)).int()
    queries = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=q.device)
    stretch = (slots * kv_heads * depth - (kv_heads - 1) * depth, kv_heads, size)
    keys, values = (cache.as_strided(stretch, (size, depth * size, 1)) for cache in (kv.keys, kv.values))
    out = torch.ops.aten._flash_attention_forward(
        q.flatten(0, 1), keys, values, queries, functional.pad(begins, (0, 1)), tokens, depth, 0.0, True, False,
        seqused_k=(first + tokens).int().clamp(max=depth),
    )[0]  # fmt: skip
    answer: Tensor = out.view(rows, tokens, heads, size).masked_fill(~exists[..., None, None], 0)
    return answer.flatten(-2)
