"""Steps that follow one another without the host: forward pass, argmax, forced acceptance, commit, next inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trtllm_replayssm.bench.step.cases import StepCase, acceptance_table, spread_records
from trtllm_replayssm.runtime.session.torch_session import TorchSession


class StepLoop:
    """The rows of a case over the first slots of a session, recorded once and replayed by `run`.

    Sequences have no real prompt: positions are written into the cursors, keys and values are random numbers, recurrent
    states are what the warm-up steps make of zero states. The ids that a step yields, each moved by a constant of its
    place, are the inputs of the next one.
    """

    def __init__(self, session: TorchSession, case: StepCase) -> None:
        """Record the work; no state has moved afterwards."""
        self._session = session
        self._case = case
        device = session.pools.cursors.position.device
        self._step = session.static_step(case.rows, case.tokens)
        table = acceptance_table(case.accepted, case.rows)
        self._table = torch.tensor(table, dtype=torch.int64, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        generator = torch.Generator(device).manual_seed(1)
        self._shift = torch.randint(
            session.geometry.vocab, self._step.ids.shape, device=device, generator=generator
        )  # a random model would soon repeat the same few ids in all rows, and choose the same experts
        self.run: Callable[[], Tensor] = session.graphs.captured(self._work)
        """One step; gives its logits [B, T, V], of several ranks those of this one's part of the vocabulary."""

    def begin(self, position: int) -> None:
        """Put every row's sequence at `position`, rows at all places of their windows, and random ids as inputs."""
        case, cursors = self._case, self._session.pools.cursors
        rows = slice(0, case.rows)
        for register in (cursors.origin, cursors.h):
            register[rows] = 0
        if not case.conventional:
            records = spread_records(case.replay, case.tokens, case.rows)
            cursors.h[rows] = torch.tensor(records, dtype=cursors.h.dtype, device=cursors.h.device)
        cursors.position[rows] = position
        self._step.ids.random_(0, self._session.geometry.vocab)
        self._step.slot.copy_(torch.arange(case.rows))
        self._step.num_tokens.fill_(case.tokens)
        self._turn.zero_()

    def end(self) -> None:
        """Make all rows padding again."""
        self._step.clear()

    def _work(self) -> Tensor:
        step = self._step
        logits = step.forward(own_logits=True).logits
        step.commit(self._table.index_select(0, self._turn)[0])
        step.ids.copy_((step.best(logits) + self._shift) % self._session.geometry.vocab)
        self._turn.add_(1).remainder_(len(self._table))
        return logits


def fill_caches(session: TorchSession) -> None:
    """Random keys and values everywhere: steps read positions that nothing wrote. One seed for all slots in use."""
    device = session.pools.cursors.position.device
    generator = torch.Generator(device).manual_seed(0)
    for layer in session.pools.kv.values():
        for tensor in layer.tensors():
            tensor.normal_(generator=generator)
