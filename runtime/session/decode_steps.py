"""Decode and verify steps of a session: static steps by batch size and width, recorded where the device can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.runtime.session.capture import GraphPool
from trtllm_replayssm.runtime.session.graph_sizes import RecordedSizes
from trtllm_replayssm.runtime.session.logits_buffer import LogitsBuffer
from trtllm_replayssm.runtime.session.static_step import StaticStep, StepModel

Remember = Callable[[StaticStep, Tensor], None]
"""Called in each step with its hidden states [B, T, hidden]; part of what is recorded."""


@dataclass(frozen=True)
class _Ready:
    """A step that can run: forward() -> logits [B, T, V]; commit() reads `accepted` [B] int32.

    host_*: where the host writes the inputs, pinned on a GPU, so that their copies are only enqueued. They are written
    again when the logits of the step have been read, at the earliest, which waits for those copies.
    """

    step: StaticStep
    accepted: Tensor
    host_ids: Tensor  # [B, T] int64
    host_rows: Tensor  # [3, B] int32: slot, num_tokens, accepted
    forward: Callable[[], Tensor]
    commit: Callable[[], None]


class DecodeSteps:
    """Steps by (batch, width), made when first needed or by `warm_up`."""

    def __init__(
        self, model: StepModel, graphs: GraphPool, sizes: RecordedSizes, logits: LogitsBuffer, remember: Remember
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._sizes = sizes
        self._logits = logits
        self._remember = remember
        self._ready: dict[tuple[int, int], _Ready] = {}
        self._last: _Ready | None = None

    def warm_up(self) -> None:
        """Record every batch size with one token a row and with T_max; the largest first, so that the others fit in
        its memory. HAZARD: no step may await its commit."""
        for width in sorted({1, self._model.pools.replay.max_step_tokens}, reverse=True):
            for batch in reversed(self._sizes.sizes):
                self._find(batch, width)

    def run(self, ids: Tensor, rows: StepRows) -> Tensor:
        """ids [n, w] int64 and rows [n], on the host, checked -> logits [n, w, V] on the device.

        They stay valid until the next recorded work of the session.
        """
        count, width = ids.shape
        ready = self._last = self._find(self._model.network.rows_for(rows.slot.tolist()), width)
        ready.host_ids.zero_()[:count, :width] = ids
        ready.host_rows[0].fill_(-1)[:count] = rows.slot
        ready.host_rows[1].zero_()[:count] = rows.num_tokens
        ready.step.ids.copy_(ready.host_ids, non_blocking=True)
        ready.step.slot.copy_(ready.host_rows[0], non_blocking=True)
        ready.step.num_tokens.copy_(ready.host_rows[1], non_blocking=True)
        return ready.forward()[:count, :width]

    def commit(self, accepted: Sequence[int]) -> None:
        """Commit the first accepted[i] tokens of row i of the last `run`; counts that fit int32."""
        ready = self._last
        assert ready is not None, "a step comes first"
        ready.host_rows[2].zero_()[: len(accepted)] = torch.tensor(accepted, dtype=torch.int32)
        ready.accepted.copy_(ready.host_rows[2], non_blocking=True)
        ready.commit()
        self._last = None

    def _find(self, rows: int, width: int) -> _Ready:
        size = self._sizes.place(rows)
        batch = rows if size is None else size
        columns = width if size is None or width == 1 else self._model.pools.replay.max_step_tokens
        if (batch, columns) not in self._ready:
            # what is not recorded costs nothing to make again: only recorded steps have few shapes
            ready = self._make(batch, columns, recorded=size is not None)
            if size is None:
                return ready
            self._ready[batch, columns] = ready
        return self._ready[batch, columns]

    def _make(self, batch: int, width: int, *, recorded: bool) -> _Ready:
        step = StaticStep(self._model, batch, width)
        device, pinned = step.ids.device, step.ids.is_cuda
        accepted = torch.zeros(batch, dtype=torch.int32, device=device)
        host_ids = torch.zeros((batch, width), dtype=torch.int64, pin_memory=pinned)
        host_rows = torch.zeros((3, batch), dtype=torch.int32, pin_memory=pinned)

        def forward() -> Tensor:
            output = step.forward()
            self._remember(step, output.hidden)
            return self._logits.keep(output.logits) if recorded else output.logits

        def commit() -> None:
            step.commit(accepted)

        if not recorded:
            return _Ready(step, accepted, host_ids, host_rows, forward, commit)
        captured = self._graphs.captured
        return _Ready(step, accepted, host_ids, host_rows, captured(forward), captured(commit))
