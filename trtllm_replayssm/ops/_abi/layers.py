"""elementwise.h and attention.h: what surrounds the matrix products of a layer, and attention over KV slots."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from trtllm_replayssm.ops._abi.records import Args, fields

ELEMENTWISE_PROGRAMMATIC_LAUNCH = 1
ATTENTION_PROGRAMMATIC_LAUNCH = 1


class Function(IntEnum):
    """RSSM_SILU ...: activations."""

    SILU = 1
    SIGMOID = 2
    RELU2 = 3


class RmsNormArgs(Args):
    """rssm_rms_norm_args: RMSNorm of rows, with a residual sum before it; see elementwise.h."""

    _fields_ = fields(
        {
            "flags": ctypes.c_uint32,
            "eps": ctypes.c_float,
            "weight_offset": ctypes.c_float,
            "reserved": ctypes.c_int32,
        },
        "x", "residual", "weight", "sum", "out",
    )  # fmt: skip


class ActivationArgs(Args):
    """rssm_activation_args: an activation times a factor and a row's opening; see elementwise.h."""

    _fields_ = fields({"flags": ctypes.c_uint32, "function": ctypes.c_int32}, "x", "factor", "opening", "out")


class AttentionInputsArgs(Args):
    """rssm_attention_inputs_args: head norms, rotation and the write into the KV slots; see attention.h."""

    _fields_ = fields(
        {
            "flags": ctypes.c_uint32,
            "eps": ctypes.c_float,
            "weight_offset": ctypes.c_float,
            "reserved": ctypes.c_int32,
        },
        "slot", "start", "num_tokens", "q", "k", "v", "q_weight", "k_weight", "cosine", "sine", "q_out", "keys",
        "values",
    )  # fmt: skip


class AttentionArgs(Args):
    """rssm_attention_args: attention of a step over the KV slots; see attention.h."""

    _fields_ = fields(
        {"flags": ctypes.c_uint32, "scale": ctypes.c_float},
        "slot", "start", "num_tokens", "q", "keys", "values", "out",
    )  # fmt: skip
