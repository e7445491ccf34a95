"""What a drafter is: it proposes tokens for the next step from what a request has so far.

Implementations: `ngram` (prompt lookup) and `mtp` (the model's multi-token-prediction head).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.runtime.sampling.distribution import TokenHistory
from trtllm_replayssm.runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens, and the distributions q [n, V] float64 that they were drawn from (None: not sampled)."""

    tokens: tuple[int, ...] = ()
    q: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """One request as a drafter sees it after a step.

    slot: its slot. tokens: prompt and output; the last one is the next step's base token and is not committed.
    next_tokens: the tokens that follow the positions its last step committed. room: drafts wanted at most; 0 for a
    prompt that has more chunks to come, and where no draft could still be emitted. feed: a head must take these
    positions in even so, because something will be drafted behind them: the rest of a prompt, or of a conversation.
    stop_ids: masked for the minimum length. history counts penalties.
    """

    slot: int
    tokens: Sequence[int]
    next_tokens: Sequence[int]
    room: int
    feed: bool
    params: SamplingParams
    history: TokenHistory
    stop_ids: frozenset[int]
    seed: int


class Drafter(Protocol):
    """Proposes drafts for a batch of requests after each engine step."""

    @property
    def max_draft_len(self) -> int:
        """Drafts per request and step at most."""
        ...

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft per context, of at most its `room` tokens."""
        ...
