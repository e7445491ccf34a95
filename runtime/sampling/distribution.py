"""From one row of logits to the distribution a token is drawn from, in float64.

Order: bias, repetition, presence and frequency penalties, minimum length, temperature, top-k, top-p, min-p. Ties are
broken towards the lowest token id everywhere, so that a result never depends on a sort.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.sampling.leaders import falling, leaders
from trtllm_replayssm.runtime.sampling.mask import GuardedMask
from trtllm_replayssm.runtime.sampling.params import SamplingParams

NOT_A_NUMBER = "the model's logits are not finite"

_FIRST_TRIED = 256  # tokens that are sorted first for top-p

Scores = NDArray[np.float64]
Logits = NDArray[np.float32]


class TokenHistory:
    """The tokens that penalties count: which ids the prompt holds and how often the output holds each.

    A mask of the choice's own travels along, because it follows the same emitted tokens and forks with them.
    """

    def __init__(self, prompt_ids: Sequence[int], mask: GuardedMask | None = None) -> None:
        self.mask = mask
        self._prompt = frozenset(prompt_ids)
        self._counts: dict[int, int] = {}
        self.num_output = 0

    def add(self, token: int) -> None:
        """Count one more output token. Raises RequestError when the mask cannot follow."""
        self._counts[token] = self._counts.get(token, 0) + 1
        self.num_output += 1
        if self.mask is not None:
            self.mask.accept(token)

    def fork(self) -> TokenHistory:
        """A copy that counts on its own."""
        copy = TokenHistory((), None if self.mask is None else self.mask.fork())
        copy._prompt = self._prompt
        copy._counts = dict(self._counts)
        copy.num_output = self.num_output
        return copy

    def counts(self, drafted: Iterable[int]) -> dict[int, int]:
        """Output counts by id, with a drafted prefix counted as output."""
        counts = dict(self._counts)
        for token in drafted:
            counts[token] = counts.get(token, 0) + 1
        return counts

    @property
    def prompt(self) -> frozenset[int]:
        """Distinct ids of the prompt."""
        return self._prompt


def penalised(
    logits: Logits,
    params: SamplingParams,
    history: TokenHistory,
    drafted: Sequence[int],
    stop_ids: frozenset[int],
) -> Scores:
    """Logits [V] float32 -> scores [V] float64 after bias, penalties, the history's mask and the minimum length.

    drafted: draft tokens before this position, counted as output. stop_ids: end and stop tokens, masked while the
    output (drafts included) is shorter than params.min_tokens, unless the mask allows nothing else.
    Raises RequestError when the mask fails, or when no finite score is left to draw from.
    """
    scores = logits.astype(np.float64)
    if params.penalises:
        _penalise(scores, params, history, drafted)
    if history.mask is not None:
        allowed = history.mask.allowed(drafted, scores.size)
        if allowed is not None:
            scores[~allowed] = -np.inf
    best = scores.max()  # NaN wins a maximum
    if not np.isfinite(best):
        raise RequestError("sampling", "scores", expected="a finite best score after penalties and mask", got=best)
    if history.num_output + len(drafted) < (params.min_tokens or 0):
        longer: Scores = scores.copy()
        longer[list(stop_ids)] = -np.inf
        if np.isfinite(longer).any():
            return longer
    return scores


def broken(logits: Logits) -> bool:
    """Whether logits [..., V] cannot be sampled from: a NaN, or a row whose largest value is not finite."""
    best = logits.max(axis=-1)  # NaN wins a maximum
    return not bool(np.isfinite(best).all())


def _penalise(scores: Scores, params: SamplingParams, history: TokenHistory, drafted: Sequence[int]) -> None:
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    counts = history.counts(drafted)
    if params.repeats and params.repetition_penalty is not None:
        seen = np.fromiter(history.prompt | counts.keys(), np.int64)
        values = scores[seen]
        scores[seen] = np.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = np.fromiter(counts.keys(), np.int64)
        times = np.fromiter(counts.values(), np.float64)
        scores[ids] -= (params.presence_penalty or 0.0) + times * (params.frequency_penalty or 0.0)


def probabilities(scores: Scores, params: SamplingParams) -> Scores:
    """Scores [V] float64 -> probabilities [V] float64 that sum to 1, after temperature and filters.

    Raises RequestError when they do not add up to a positive finite number.
    """
    temperature = 1.0 if params.temperature is None else params.temperature
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, weight 0, is what is meant
        weights = np.exp((scores - scores.max()) / temperature)
    if params.top_k and params.top_k < weights.size:
        weights = _keep(weights, _best(weights, params.top_k))
    if params.top_p is not None and params.top_p < 1:
        weights = _top_p(weights, params.top_p)
    if params.min_p:
        weights = np.where(weights >= params.min_p * weights.max(), weights, 0.0)
    total = weights.sum()
    if not 0 < total < np.inf:
        raise RequestError("sampling", "probabilities", expected="a positive finite total", got=total)
    return np.asarray(weights / total)


def _best(weights: Scores, k: int) -> NDArray[np.int64]:
    """Ids of the k largest weights, ties towards the lowest id."""
    return falling(weights, leaders(weights, k))[:k]


def _top_p(weights: Scores, top_p: float) -> Scores:
    """Keep the smallest set of best tokens whose probability reaches top_p; always at least one."""
    total, count = weights.sum(), _FIRST_TRIED
    while True:
        count = min(count, weights.size)
        ids = leaders(weights, count)  # nearly always the set is among the best few, and nothing else need be sorted
        order = falling(weights, ids[weights[ids] > 0])  # top-k may have left few
        reached = np.cumsum(weights[order] / total) >= top_p
        if reached.any():
            return _keep(weights, order[: int(np.argmax(reached)) + 1])
        if count == weights.size:
            return weights
        count *= 16


def _keep(weights: Scores, ids: NDArray[np.int64]) -> Scores:
    kept = np.zeros_like(weights)
    kept[ids] = weights[ids]
    return kept
