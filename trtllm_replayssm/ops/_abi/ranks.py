"""sum_ranks.h: the sum of rows over the ranks that share a model."""

from __future__ import annotations

import ctypes

from trtllm_replayssm.ops._abi.records import Args, fields

SUM_RANKS_PROGRAMMATIC_LAUNCH = 1
MAX_RANKS = 8


class SumRanksArgs(Args):
    """rssm_sum_ranks_args: the sum over ranks, a residual sum and RMSNorm; see sum_ranks.h."""

    _fields_ = fields(
        {
            "flags": ctypes.c_uint32,
            "eps": ctypes.c_float,
            "weight_offset": ctypes.c_float,
            "rank": ctypes.c_int32,
            "ranks": ctypes.c_int32,
            "capacity": ctypes.c_int32,
            "patience_ns": ctypes.c_int64,
            "inbox": ctypes.c_void_p * MAX_RANKS,
            "gave_up": ctypes.c_void_p,
        },
        "x", "residual", "weight", "turn", "sum", "out",
    )  # fmt: skip
