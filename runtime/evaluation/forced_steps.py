"""Steps of a forced decoding: ids from a table on the device, forward, commit. Recorded once and replayed on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trtllm_replayssm.runtime.evaluation.rounding_pass import RoundingPass
from trtllm_replayssm.runtime.session.torch_session import TorchSession


class ForcedSteps:
    """Rows in lockstep: row i of every step is slots[i] and takes its next tokens from ids[i]."""

    def __init__(
        self, session: TorchSession, slots: Sequence[int], ids: Sequence[Sequence[int]],
        rounding: RoundingPass | None = None,
    ) -> None:  # fmt: skip
        """ids: tokens of each row from position 0 on, all of one length; rounding: runs behind every flush."""
        device = session.pools.cursors.position.device
        self._session = session
        self._rounding = rounding
        self._slots_on_host = list(slots)
        self._slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self._ids = torch.tensor(ids, dtype=torch.int64, device=device)
        self._work: dict[tuple[int, bool], Callable[[], Tensor]] = {}
        self._recorded: dict[tuple[int, bool], Callable[[], Tensor]] = {}

    def run(self, tokens: int, *, flushes: bool) -> Tensor:
        """Decode and commit `tokens` tokens of every row -> logits [rows, tokens, V] float32, valid until the next run.

        flushes: whether this step flushes, which the caller knows; see `StaticStep`. The first step of a kind runs as
        it is, so that all it makes lazily exists; from the second on it is a graph where the device has graphs.
        """
        kind = (tokens, flushes)
        self._session.moved(self._slots_on_host)
        if kind not in self._work:
            self._work[kind] = self._step(tokens, flushes)
            return self._work[kind]()
        if kind not in self._recorded:
            self._recorded[kind] = self._session.graphs.captured(self._work[kind], warm_ups=0)
        return self._recorded[kind]()

    def following(self, start: int, stop: int) -> Tensor:
        """The tokens behind positions start .. stop - 1 of each row, [rows, n]; fewer at the end of the texts."""
        return self._ids[:, start + 1 : stop + 1]

    def _step(self, tokens: int, flushes: bool) -> Callable[[], Tensor]:
        rows = len(self._slots)
        step = self._session.static_step(rows, tokens, flushes=flushes)
        step.slot.copy_(self._slots)
        step.num_tokens.fill_(tokens)
        places = torch.arange(tokens, device=self._ids.device)
        taken = torch.full((rows,), tokens, dtype=torch.int64, device=self._ids.device)

        @torch.inference_mode()
        def work() -> Tensor:
            start = step.position()
            step.ids.copy_(self._ids.gather(1, start[:, None] + places))
            logits = step.forward().logits
            step.commit(taken)
            if self._rounding is not None and flushes:
                self._rounding.apply(start)
            return logits

        return work
