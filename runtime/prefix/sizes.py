"""Bytes of a snapshot, from the shapes: what a budget must hold, and what a hit spares."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.spec.traffic import slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBytes:
    """state: float32 recurrent states of all SSM layers. windows: convolution windows. other: cursors, hidden state.

    kv_per_token: keys and values of one position over all attention layers, a drafting head's included.
    """

    state: int
    windows: int
    other: int
    kv_per_token: int

    def total(self, tokens: int) -> int:
        """A snapshot that holds the keys and values of `tokens` positions."""
        return self.state + self.windows + self.other + tokens * self.kv_per_token


def prompt_snapshot_bytes(geometry: ModelGeometry, replay: ReplayConfig, activation: ActivationDtype) -> SnapshotBytes:
    """A snapshot between two chunks of a prompt."""
    slot = slot_bytes(geometry, replay, PoolConfig(slots=1, max_seq_len=1, activation=activation))
    head = StateFormat.FLOAT32.bytes_per_head(geometry.ssm.head_dim, geometry.ssm.state_dim)
    return SnapshotBytes(
        state=len(geometry.ssm_layers) * geometry.ssm.heads * head,
        windows=slot.conv_windows,
        other=slot.cursors + (geometry.hidden * activation.itemsize if geometry.mtp_pattern else 0),
        kv_per_token=slot.kv,
    )
