"""KV cache update and attention with TensorRT's own layers, and rotary embedding.

The mask is written out: a query sees the positions up to its own, whatever the row's padding. Cache rows are step rows,
and a row's tokens that do not exist write behind its last position, where nothing is read and the next step writes
again; so a cache has T_max rows more than max_seq_len.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trtllm_replayssm.builders.network import Network


def rotary(net: Network, x: Any, positions: Any, rotary_dim: int, theta: float, depth: int) -> Any:
    """x [B, heads, T, D] -> same, its first `rotary_dim` channels turned in float32; tables of `depth` positions."""
    half = rotary_dim // 2
    frequency = theta ** (np.arange(half, dtype=np.float64) * (-2.0 / rotary_dim))
    angle = np.arange(depth, dtype=np.float64)[:, None] * frequency  # float64: exact at long positions
    name = f"rotary {rotary_dim} {theta:g} {depth}"
    cos = net.constant(f"{name} cos", np.cos(angle).astype(np.float32), shape=(depth, half))
    sin = net.constant(f"{name} sin", np.sin(angle).astype(np.float32), shape=(depth, half))
    layer = net.definition.add_rotary_embedding(net.wide(x), cos, sin, False, rotary_dim)
    layer.set_input(3, positions)
    return net.narrow(net.named(layer, f"rotary {x.name}"))


def update_cache(net: Network, cache: Any, new: Any, position: Any, name: str) -> Any:
    """cache [B, Hkv, depth, D] with new [B, Hkv, T, D] at `position` [B] of each row, in the same memory."""
    layer = net.definition.add_kv_cache_update(cache, new, position, net.trt.KVCacheMode.LINEAR)
    return net.named(layer, name)


def scaled_query(net: Network, q: Any, name: str) -> Any:
    """q / sqrt(D) in the activation type, rounded once: the attention layer applies no scale of its own.

    HAZARD: belongs in the network before the attention, which must get its queries as a network input: from the same
    network the compiler copies the cache for every query head.
    """
    factor = net.scalar(float(q.shape[-1]) ** -0.5, rank=4)
    return net.narrow(net.binary(net.wide(q), factor, "PROD", f"{name} scaled query"))


def attend(net: Network, q: Any, keys: Any, values: Any, positions: Any, name: str) -> Any:
    """Scaled q [B, H, T, D] over caches [B, Hkv, depth, D] -> [B, H, T, D]; positions [B, T] absolute."""
    depth = keys.shape[2]
    column = net.constant(
        f"positions of {depth}", np.arange(depth, dtype=np.int32).reshape(1, 1, 1, depth), shape=(1, 1, 1, depth)
    )
    own = net.reshape(positions, (0, 1, -1, 1), f"{name} own position")
    seen = net.unary(net.binary(column, own, "GREATER", f"{name} later"), "NOT", f"{name} seen")
    layer = net.definition.add_attention_v2(
        q, keys, values, net.trt.AttentionNormalizationOp.SOFTMAX, net.trt.CausalMaskKind.NONE
    )
    layer.decomposable = True  # the compiler has no kernel of its own for one query and few heads
    layer.mask = seen
    return net.named(layer, name)
