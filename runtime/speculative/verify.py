"""From a step's logits to the tokens it emits: greedy and lossless acceptance, cut where the request ends.

Each emitted token is offered to `finished` in order, so that an end token is seen before the length limit that a
later token of the same step would reach. The last emitted token is the next base; the tokens to commit are the base
and the accepted drafts, which are as many as the emitted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.sampling.distribution import Logits, Scores, TokenHistory, penalised, probabilities
from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.speculative.drafter import Draft
from trtllm_replayssm.spec.accept import accept_general, draw
from trtllm_replayssm.spec.philox import Domain, uniform


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyContext:
    """How one request draws. position: absolute position of the first emitted token; history: output so far."""

    params: SamplingParams
    history: TokenHistory
    stop_ids: frozenset[int]
    seed: int
    position: int


def verify(
    logits: Logits,
    draft: Draft,
    context: VerifyContext,
    finished: Callable[[int, TokenLogprobs | None], bool],
) -> int:
    """Emit tokens of one row; returns how many, which is also how many tokens of the row to commit.

    logits: [n + 1, V] after the base token and each of the n drafts, without NaN. finished(token, logprobs) takes an
    emitted token and says whether the request ends with it. context.history then counts the emitted tokens.
    Raises RequestError where a token cannot be drawn; those before it have been offered to `finished`.
    """
    tokens: list[int] = []
    for token in _emitted(logits, draft, context):
        top = context.params.logprobs
        entry = None if top is None else token_logprobs(logits[len(tokens)], token, top)
        tokens.append(token)
        if finished(token, entry):
            break
    for token in tokens:  # only now: while tokens are drawn, the drafted prefix is counted on top of the history
        context.history.add(token)
    return len(tokens)


def _emitted(logits: Logits, draft: Draft, context: VerifyContext) -> Iterator[int]:
    if draft.q is not None and not context.params.greedy:
        p = _reachable(logits, draft, context)
        drafts = len(p) - 1
        yield from accept_general(p, draft.q[:drafts], draft.tokens[:drafts], context.seed, context.position).tokens
        return
    for s in range(len(draft) + 1):
        token = _draw(logits, draft, context, s)
        yield token
        if s == len(draft) or token != draft.tokens[s]:
            return


def _reachable(logits: Logits, draft: Draft, context: VerifyContext) -> Scores:
    """Distributions [m + 1, V] up to the first position without one: it may lie behind a rejected draft or the end.

    If it does not, a later step begins there. Raises RequestError when that is the first position.
    """
    rows: list[Scores] = []
    for s in range(len(draft) + 1):
        try:
            rows.append(_distribution(logits, draft, context, s))
        except RequestError:
            if not rows:
                raise
            break
    return np.stack(rows)


def _draw(logits: Logits, draft: Draft, context: VerifyContext, s: int) -> int:
    if context.params.greedy:
        return int(np.argmax(_scores(logits, draft, context, s)))
    u = uniform(context.seed, context.position + s, Domain.TOKEN)
    return draw(_distribution(logits, draft, context, s), u)


def _distribution(logits: Logits, draft: Draft, context: VerifyContext, s: int) -> Scores:
    return probabilities(_scores(logits, draft, context, s), context.params)


def _scores(logits: Logits, draft: Draft, context: VerifyContext, s: int) -> Scores:
    return penalised(logits[s], context.params, context.history, draft.tokens[:s], context.stop_ids)
