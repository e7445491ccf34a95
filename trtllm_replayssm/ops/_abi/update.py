"""update.h, decay_skip.h and commit.h: one decode step of one layer, and the cursors of all rows after it."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from trtllm_replayssm.ops._abi.records import Args, fields

UPDATE_PROGRAMMATIC_LAUNCH = 1
UPDATE_SETTLED_STATE = 2


class Kind(IntEnum):
    """RSSM_MAMBA2, RSSM_GDN of update.h."""

    MAMBA2 = 1
    GDN = 2


class LaunchConstants(ctypes.Structure):
    """rssm_update_launch: what a step asks of its launch; zero: the library's choice."""

    _fields_ = [(name, ctypes.c_int32) for name in (
        "kernel", "multiprocessors", "run_heads", "piece_heads", "drawn_rounds", "stages",
    )]  # fmt: skip


class LaunchRecord(ctypes.Structure):
    """rssm_update_plan: the launch that a step takes; see update.h."""

    _fields_ = [(name, ctypes.c_int32) for name in (
        "kernel", "ctas", "threads", "shared_bytes", "stages", "workers", "rounds", "run_heads", "pieces",
        "piece_heads", "single_heads",
    )]  # fmt: skip


class UpdateArgs(Args):
    """rssm_update_args: one decode step of one layer; see update.h for every field's shape and dtype."""

    _fields_ = fields(
        {
            "kind": ctypes.c_int32,
            "window": ctypes.c_int32,
            "layer": ctypes.c_int32,
            "head_offset": ctypes.c_int32,
            "flags": ctypes.c_uint32,
            "reserved": ctypes.c_int32,
            "launch": LaunchConstants,
        },
        "slot", "num_tokens", "origin", "h", "position", "seed",
        "value", "k", "q", "dt", "a", "skip", "log_decay", "beta", "out",
        "checkpoint", "checkpoint_scale", "read", "read_scale", "read_head_scale",
        "ring_value", "ring_k", "ring_dt", "ring_key_factor", "ring_v", "ring_beta",
    )  # fmt: skip


class DecaySkipArgs(Args):
    """rssm_decay_skip_args: a Mamba-2 step that reads no checkpoint of a faded head; see decay_skip.h."""

    _fields_ = fields({"skip_below": ctypes.c_float, "reserved": ctypes.c_int32, "update": UpdateArgs})


class CommitArgs(Args):
    """rssm_commit_args: the cursors of all rows after a step; see commit.h."""

    _fields_ = fields(
        {"window": ctypes.c_int32, "ring_rows": ctypes.c_int32},
        "slot", "num_tokens", "accepted", "origin", "h", "position",
    )  # fmt: skip
