"""experts.h and route.h: routing, routed experts and dense products with packed weights."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from trtllm_replayssm.ops._abi.records import Args, fields

EXPERTS_PROGRAMMATIC_LAUNCH = 1
ROUTE_PROGRAMMATIC_LAUNCH = 1


class RouterKind(IntEnum):
    """RSSM_ROUTER_SOFTMAX ... of route.h."""

    SOFTMAX = 0
    SIGMOID = 1


class PackedWeights(ctypes.Structure):
    """rssm_packed_weights: a stack of matrices in the kernels' order; see weights/packing.py."""

    _fields_ = fields(
        {
            "rows": ctypes.c_int32,
            "columns": ctypes.c_int32,
            "parts": ctypes.c_int32,
            "reserved": ctypes.c_int32,
        },
        "data", "block_scale", "factor",
    )  # fmt: skip


class ExpertsArgs(Args):
    """rssm_experts_args: the routed experts of one layer; see experts.h."""

    _fields_ = fields(
        {
            "flags": ctypes.c_uint32,
            "pass_tokens": ctypes.c_int32,
            "up": PackedWeights,
            "down": PackedWeights,
        },
        "x", "ids", "weights", "out",
    )  # fmt: skip


class PackedLinearArgs(Args):
    """rssm_packed_linear_args: one dense product; see experts.h."""

    _fields_ = fields(
        {"flags": ctypes.c_uint32, "pass_tokens": ctypes.c_int32, "weight": PackedWeights},
        "x", "out",
    )  # fmt: skip


class RouteArgs(Args):
    """rssm_route_args: the choice of experts; see route.h."""

    _fields_ = fields(
        {
            "flags": ctypes.c_uint32,
            "router": ctypes.c_int32,
            "groups": ctypes.c_int32,
            "topk_group": ctypes.c_int32,
            "norm_topk": ctypes.c_int32,
            "scaling": ctypes.c_float,
        },
        "logits", "bias", "slot", "num_tokens", "ids", "weights",
    )  # fmt: skip
