"""One forward pass of a model over the rows of a step: what sessions differ in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.models import model_of
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.native_ranks import Inboxes
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.best_tokens import best_tokens
from trtllm_replayssm.runtime.session.ranks import Ranks, Sharing
from trtllm_replayssm.runtime.session.step_context import StepContext
from trtllm_replayssm.runtime.session.torch_graph import TorchGraph
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights


class Network(Protocol):
    """The main network and the multi-token-prediction head.

    ids [B, T] int64 -> hidden [B, T, hidden] in the activation type, logits [B, K, vocab] float32: K = T in a decode
    step, else 1, the row's last token. Where `StepContext.own_logits` asks for it, of several ranks each may give the
    logits of its part of the vocabulary.
    """

    def forward(self, ctx: StepContext, ids: Tensor) -> ModelOutput[Tensor]:
        """The main network; appends records and writes windows and caches, moves no cursor."""
        ...

    def mtp_forward(self, ctx: StepContext, next_ids: Tensor, hidden: Tensor) -> ModelOutput[Tensor]:
        """The head on pairs (token t + 1, hidden [B, T, hidden] of t)."""
        ...

    def best(self, logits: Tensor) -> Tensor:
        """Ids [B, K] int64 of the largest of a pass's logits, the lowest of equal ones: the same on every rank."""
        ...

    def rows_for(self, slots: Sequence[int]) -> int:
        """Rows that a decode step over `slots` (-1: padding) needs, one for each at least; more are padding."""
        ...

    def obstacle(self) -> str | None:
        """Why passes cannot be recorded on the current stream after all; None when they can."""
        ...


class TorchNetwork:
    """The model's description, run by torch. poison: rows of tokens that do not exist become NaN (debugging).

    Where weights are a rank's, geometry and states are that rank's too.
    """

    def __init__(self, pools: StatePools, weights: TorchWeights, state_ops: StateOps, *, poison: bool) -> None:
        """state_ops: over these pools. Collective where weights are a rank's."""
        geometry, ranks = pools.geometry, weights.ranks
        inboxes = None if ranks is None or not state_ops.native_heads else _inboxes(ranks, pools)
        self._sharing = None if ranks is None else Sharing.of(geometry, ranks, inboxes)
        self._geometry, self._model = geometry, model_of(geometry)
        self._weights, self._state_ops, self._poison = weights, state_ops, poison

    def forward(self, ctx: StepContext, ids: Tensor) -> ModelOutput[Tensor]:
        """See `Network.forward`."""
        return self._model.forward(self._graph(ctx), self._geometry, ids)

    def mtp_forward(self, ctx: StepContext, next_ids: Tensor, hidden: Tensor) -> ModelOutput[Tensor]:
        """See `Network.mtp_forward`."""
        return self._model.mtp_forward(self._graph(ctx), self._geometry, next_ids, hidden)

    def best(self, logits: Tensor) -> Tensor:
        """See `Network.best`."""
        return best_tokens(logits, self._geometry.vocab, self._weights.ranks)

    def rows_for(self, slots: Sequence[int]) -> int:
        """See `Network.rows_for`: any row takes any slot."""
        return len(slots)

    def obstacle(self) -> str | None:
        """See `Network.obstacle`: routed experts. Whoever records knows whether the other operations wait."""
        if self._state_ops.experts_wait:
            return "the routed experts run the reference operations, which wait for the device"
        return None

    def _graph(self, ctx: StepContext) -> TorchGraph:
        return TorchGraph(self._weights, self._state_ops, ctx, poison=self._poison, sharing=self._sharing)


def _inboxes(ranks: Ranks, pools: StatePools) -> Inboxes | None:
    """Room for what the largest step adds up over the ranks."""
    rows = pools.pool.slots * pools.replay.max_step_tokens
    return ranks.inboxes(
        rows, pools.geometry.hidden, torch_dtype(pools.pool.activation), pools.cursors.position.device
    )
