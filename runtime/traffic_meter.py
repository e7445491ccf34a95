"""Counts recurrent-state bytes of decode rows, as kept here and as a conventional kernel would move them."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.stats import EngineStats
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.spec.cursors import flushes
from trtllm_replayssm.spec.traffic import conventional_step_bytes, step_bytes


@dataclass(frozen=True, slots=True)
class _Row:
    """Bytes of one row of all SSM layers, as a conventional kernel and as kept here; whether its step folds."""

    usual: int
    kept: int
    flushes: bool


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
        self._rows: dict[tuple[int, int], _Row] = {}  # at most (window + 1) * max_step_tokens of them

    def decode_row(self, pending: int, num_tokens: int, emitted: int) -> int:
        """Count a row of num_tokens with `pending` records in its ring; returns the records it leaves there."""
        stats = self._stats
        row = self._rows.get((pending, num_tokens)) or self._counted(pending, num_tokens)
        stats.decode_rows += 1
        stats.drafted_tokens += num_tokens - 1
        stats.accepted_tokens += max(emitted - 1, 0)
        stats.acceptance[emitted] += 1
        stats.conventional_bytes += row.usual
        stats.state_bytes += row.kept
        if self._conventional:
            return 0
        if row.flushes:
            stats.flushes += 1
            return emitted
        return pending + emitted

    def _counted(self, pending: int, num_tokens: int) -> _Row:
        """Rows of the same two numbers move the same bytes: they are worked out once."""
        shape, replay, size, layers = self._shape, self._replay, self._itemsize, self._layers
        usual = conventional_step_bytes(shape, replay.recurrence, num_tokens, size).total * layers
        if self._conventional:
            row = _Row(usual, usual, False)
        else:
            kept = step_bytes(shape, replay, pending, num_tokens, size).total * layers
            row = _Row(usual, kept, flushes(replay, pending, num_tokens))
        self._rows[pending, num_tokens] = row
        return row
