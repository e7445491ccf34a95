"""slots.h and state_io.h: giving slots to new sequences, and whole states out of and into a pool."""

from __future__ import annotations

import ctypes

from trtllm_replayssm.ops._abi.records import Args, fields

_COPIES = ("checkpoint", "checkpoint_scale", "read", "read_scale", "read_head_scale")


class ResetSlotsArgs(Args):
    """rssm_reset_slots_args: the cursors of slots that change hands, once for all layers."""

    _fields_ = fields({}, "slot", "new_seed", "new_position", "origin", "h", "position", "seed")


class ClearStateArgs(Args):
    """rssm_clear_state_args: one layer's states of slots that change hands."""

    _fields_ = fields({}, "slot", *_COPIES)


class StateExportArgs(Args):
    """rssm_state_export_args: conventional states [E, H, P, N] float32 from checkpoint and committed records."""

    _fields_ = fields(
        {"kind": ctypes.c_int32, "window": ctypes.c_int32},
        "slot", "origin", "h", "a", "checkpoint", "checkpoint_scale",
        "ring_value", "ring_k", "ring_dt", "ring_key_factor", "ring_v", "ring_beta", "state",
    )  # fmt: skip


class StateImportArgs(Args):
    """rssm_state_import_args: conventional states [E, H, P, N] float32 into both checkpoint copies."""

    _fields_ = fields(
        {"layer": ctypes.c_int32, "head_offset": ctypes.c_int32}, "slot", "position", "seed", "state", *_COPIES
    )
