"""conventional.h: one step of the baseline on one layer."""

from __future__ import annotations

import ctypes

from trtllm_replayssm.ops._abi.records import Args, fields

CONVENTIONAL_PROGRAMMATIC_LAUNCH = 1


class ConventionalArgs(Args):
    """rssm_conventional_args: one step of the baseline on one layer; see conventional.h."""

    _fields_ = fields(
        {"kind": ctypes.c_int32, "flags": ctypes.c_uint32},
        "slot", "num_tokens", "entry",
        "value", "k", "q", "dt", "a", "skip", "log_decay", "beta", "out", "state",
    )  # fmt: skip
