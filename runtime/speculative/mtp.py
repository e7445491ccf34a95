"""Drafts from the model's multi-token-prediction head.

The head reads the hidden states of the positions a step has just committed and the tokens that follow them; each of
its own drafts is then fed back for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from trtllm_replayssm.errors import ConfigError, RequestError
from trtllm_replayssm.runtime.sampling.distribution import Logits, Scores, penalised, probabilities
from trtllm_replayssm.runtime.speculative.drafter import NO_DRAFT, Draft, DraftContext
from trtllm_replayssm.spec.accept import draw
from trtllm_replayssm.spec.philox import Domain, uniform


class DraftHead(Protocol):
    """The part of a session that the drafter drives."""

    def begin(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        """(slot, tokens that follow its newly committed positions) per row -> logits [V] of each first draft."""
        ...

    def next(self, tokens: Sequence[int]) -> list[Logits]:
        """Each row's drafted token, rows as in the last `begin` -> logits [V] of its next draft."""
        ...


class MtpDrafter:
    """Argmax drafts, or drafts sampled with the request's own settings for the general acceptance rule."""

    def __init__(self, head: DraftHead, max_draft_len: int, *, sample: bool = False) -> None:
        """sample: draw drafts of requests that are not greedy, keyed by their seed and the drafted position."""
        if max_draft_len < 1:
            raise ConfigError("MtpDrafter", "max_draft_len", expected="a positive integer", got=max_draft_len)
        self._head = head
        self._max_draft_len = max_draft_len
        self._sample = sample

    @property
    def max_draft_len(self) -> int:
        """Drafts per request and step at most."""
        return self._max_draft_len

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft per context. Rows that want equally many drafts run together, so none drafts past its room."""
        drafts = [NO_DRAFT] * len(contexts)
        groups: dict[int, list[int]] = {}
        for i, context in enumerate(contexts):
            room = min(context.room, self._max_draft_len)
            if room or context.feed:
                groups.setdefault(room, []).append(i)
        for room, members in sorted(groups.items()):
            for i, draft in zip(members, self._run([contexts[i] for i in members], room), strict=True):
                drafts[i] = draft
        return drafts

    def _run(self, contexts: Sequence[DraftContext], room: int) -> list[Draft]:
        rows = self._head.begin([(c.slot, c.next_tokens) for c in contexts])
        tokens: list[list[int]] = [[] for _ in contexts]
        q: list[list[Scores]] = [[] for _ in contexts]
        for step in range(room):
            if step:
                rows = self._head.next([drafted[-1] for drafted in tokens])
            for context, logits, drafted, distributions in zip(contexts, rows, tokens, q, strict=True):
                drafted.append(self._pick(context, logits, drafted, distributions))
        return [
            Draft(tuple(drafted), np.stack(distributions) if distributions else None)
            for drafted, distributions in zip(tokens, q, strict=True)
        ]

    def _pick(self, context: DraftContext, logits: Logits, drafted: Sequence[int], distributions: list[Scores]) -> int:
        """The next draft of one row; a sampled one leaves its distribution in `distributions`."""
        if not self._sample or context.params.greedy:
            return int(np.argmax(logits))
        try:
            scores = penalised(logits, context.params, context.history, drafted, context.stop_ids)
            p = probabilities(scores, context.params)
        except RequestError:
            # Neither a head gone astray nor a mask without an answer here, where verification may never get, is the
            # request's end: any draft will do, it is only rejected.
            p = np.full(logits.size, 1 / logits.size)
        distributions.append(p)
        position = len(context.tokens) + len(drafted)
        return draw(p, uniform(context.seed, position, Domain.DRAFT))
