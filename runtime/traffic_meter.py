"""Counts recurrent-state bytes of decode rows, as kept here and as a conventional kernel would move them."""

from __future__ import annotations

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.stats import EngineStats
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.spec.cursors import flushes
from trtllm_replayssm.spec.traffic import conventional_step_bytes, step_bytes


class TrafficMeter:
    """Adds rows to an engine's counters. The conventional kernel keeps its states in the recurrence's own format."""

    def __init__(
        self,
        geometry: ModelGeometry,
        replay: ReplayConfig,
        activation: ActivationDtype,
        stats: EngineStats,
        *,
        conventional: bool = False,
    ) -> None:
        """conventional: the session keeps state that way, so both counts are the conventional one and none flushes."""
        self._shape = geometry.ssm
        self._layers = len(geometry.ssm_layers)
        self._replay = replay
        self._itemsize = activation.itemsize
        self._stats = stats
        self._conventional = conventional

    def decode_row(self, pending: int, num_tokens: int, emitted: int) -> int:
        """Count a row of num_tokens with `pending` records in its ring; returns the records it leaves there."""
        stats, replay = self._stats, self._replay
        stats.decode_rows += 1
        stats.drafted_tokens += num_tokens - 1
        stats.accepted_tokens += max(emitted - 1, 0)
        stats.acceptance[emitted] += 1
        usual = conventional_step_bytes(self._shape, replay.recurrence, num_tokens, self._itemsize).total * self._layers
        stats.conventional_bytes += usual
        if self._conventional:
            stats.state_bytes += usual
            return 0
        stats.state_bytes += step_bytes(self._shape, replay, pending, num_tokens, self._itemsize).total * self._layers
        if flushes(replay, pending, num_tokens):
            stats.flushes += 1
            pending = 0
        return pending + emitted
