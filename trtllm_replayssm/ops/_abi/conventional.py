"""conventional.h and recovery.h: one step of the baselines on one layer."""

from __future__ import annotations

import ctypes

from trtllm_replayssm.ops._abi.records import Args, fields

CONVENTIONAL_PROGRAMMATIC_LAUNCH = 1
CONVENTIONAL_SETTLED_STATE = 2


class ConventionalArgs(Args):
    """rssm_conventional_args: one step of the baseline on one layer; see conventional.h."""

    _fields_ = fields(
        {"kind": ctypes.c_int32, "flags": ctypes.c_uint32},
        "slot", "num_tokens", "entry",
        "value", "k", "q", "dt", "a", "skip", "log_decay", "beta", "out", "state",
    )  # fmt: skip


class ConventionalCommitArgs(Args):
    """rssm_conventional_commit_args: the cursors after such a step, for all layers; see conventional.h."""

    _fields_ = fields(
        {"entries": ctypes.c_int32, "reserved": ctypes.c_int32}, "slot", "num_tokens", "accepted", "entry", "position"
    )


class RecoveryArgs(Args):
    """rssm_recovery_args: one step of a scheme of the paper's Appendix A on one layer; see recovery.h."""

    _fields_ = fields(
        {"kind": ctypes.c_int32, "flags": ctypes.c_uint32},
        "slot", "num_tokens", "replayed",
        "cached_value", "cached_k", "cached_dt", "cached_log_decay", "cached_beta",
        "value", "k", "q", "dt", "a", "skip", "log_decay", "beta", "out",
        "source", "recovered", "end",
    )  # fmt: skip
