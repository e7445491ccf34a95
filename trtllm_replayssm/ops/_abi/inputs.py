"""conv1d.h, ssm_inputs.h and gated_rms_norm.h: what surrounds the recurrence of a layer."""

from __future__ import annotations

import ctypes

from trtllm_replayssm.ops._abi.records import Args, fields

CONV1D_PROGRAMMATIC_LAUNCH = 1
NORM_PROGRAMMATIC_LAUNCH = 1


class Conv1dArgs(Args):
    """rssm_conv1d_args: the convolution of one layer over its window; see conv1d.h."""

    _fields_ = fields(
        {"flags": ctypes.c_uint32, "reserved": ctypes.c_int32},
        "slot", "num_tokens", "position", "x", "weight", "bias", "window", "out",
    )  # fmt: skip


class SsmInputsArgs(Args):
    """rssm_ssm_inputs_args: the convolution and the decay inputs of one layer; see ssm_inputs.h."""

    _fields_ = fields(
        {
            "kind": ctypes.c_int32,
            "dt_low": ctypes.c_float,
            "dt_high": ctypes.c_float,
            "reserved": ctypes.c_int32,
            "conv": Conv1dArgs,
        },
        "decay_in", "beta_in", "dt_bias", "a_log", "decay_out", "beta_out",
    )  # fmt: skip


class GatedRmsNormArgs(Args):
    """rssm_gated_rms_norm_args: RMSNorm over groups of channels with a SiLU gate; see gated_rms_norm.h."""

    _fields_ = fields(
        {
            "flags": ctypes.c_uint32,
            "groups": ctypes.c_int32,
            "gate_first": ctypes.c_int32,
            "eps": ctypes.c_float,
        },
        "x", "gate", "weight", "out",
    )  # fmt: skip
