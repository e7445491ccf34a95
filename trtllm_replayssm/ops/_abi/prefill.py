"""prefill.h: the prompt scan of one layer, and the cursors of all rows after it."""

from __future__ import annotations

import ctypes
from enum import IntFlag

from trtllm_replayssm.ops._abi.records import Args, fields


class PrefillFlag(IntFlag):
    """RSSM_PREFILL_* of prefill.h: where a row's state comes from and goes to."""

    FROM_ZERO = 1
    FROM_CARRY = 2
    TO_CARRY = 4


class PrefillArgs(Args):
    """rssm_prefill_args: a prompt or one chunk of it; see prefill.h for every field's shape and dtype."""

    _fields_ = fields(
        {
            "kind": ctypes.c_int32,
            "window": ctypes.c_int32,
            "layer": ctypes.c_int32,
            "head_offset": ctypes.c_int32,
            "flags": ctypes.c_uint32,
            "reserved": ctypes.c_int32,
        },
        "slot", "num_tokens", "row_flags", "carry_index", "origin", "h", "position", "seed",
        "value", "k", "q", "dt", "a", "skip", "log_decay", "beta", "out",
        "checkpoint", "checkpoint_scale", "read", "read_scale", "read_head_scale",
        "ring_value", "ring_k", "ring_dt", "ring_key_factor", "ring_v", "ring_beta",
        "carry",
    )  # fmt: skip


class PrefillCommitArgs(Args):
    """rssm_prefill_commit_args: the cursors of all rows after a prompt chunk; see prefill.h."""

    _fields_ = fields(
        {"max_tokens": ctypes.c_int32, "reserved": ctypes.c_int32},
        "slot", "num_tokens", "origin", "h", "position",
    )  # fmt: skip
