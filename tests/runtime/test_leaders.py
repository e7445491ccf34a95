"""Filters and scores over large vocabularies: what sorting everything would keep, and hardly anything sorted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_replayssm.runtime.sampling.distribution import probabilities
from trtllm_replayssm.runtime.sampling.leaders import leaders
from trtllm_replayssm.runtime.sampling.logprobs import token_logprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams

SIZES = st.sampled_from((1, 7, 500, 3000, 20_000))


def logits_of(size: int, steps: int, seed: int) -> Any:
    """Logits [size] float32; few steps make many ties."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, steps, size) * 0.5 if steps else rng.standard_normal(size) * 3
    return values.astype(np.float32)


def sorted_filters(scores: Any, top_k: int, top_p: float) -> Any:
    """The same by sorting all of them."""
    weights = np.exp(scores - scores.max())
    if top_k and top_k < weights.size:
        gone = np.argsort(-weights, kind="stable")[top_k:]
        weights[gone] = 0.0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        reached = np.flatnonzero(np.cumsum(weights[order] / weights.sum()) >= top_p)
        if reached.size:
            weights[order[reached[0] + 1 :]] = 0.0
    return weights / weights.sum()


@settings(deadline=None)  # machines may be slow
@given(SIZES, st.sampled_from((0, 1, 3, 40)), st.integers(0, 1 << 30), st.integers(1, 20_000))
def test_leaders_are_all_that_are_not_below_one_of_them(size: int, steps: int, seed: int, count: int) -> None:
    values, count = logits_of(size, steps, seed), min(count, size)
    found = leaders(values, count)
    assert count <= found.size and np.array_equal(found, np.flatnonzero(values >= values[found].min()))


@settings(deadline=None)  # machines may be slow
@given(SIZES, st.sampled_from((0, 1, 3, 40)), st.integers(0, 1 << 30), st.integers(0, 9000), st.floats(0.001, 1))
def test_filters_keep_what_sorting_everything_keeps(size: int, steps: int, seed: int, top_k: int, top_p: float) -> None:
    scores = logits_of(size, steps, seed).astype(np.float64)
    found = probabilities(scores, SamplingParams(top_k=top_k, top_p=top_p, temperature=1.0))
    np.testing.assert_array_equal(found, sorted_filters(scores, top_k, top_p))


@settings(deadline=None)  # machines may be slow
@given(SIZES, st.sampled_from((0, 1, 3, 40)), st.integers(0, 1 << 30), st.integers(0, 100))
def test_scores_are_those_of_sorting_everything(size: int, steps: int, seed: int, top: int) -> None:
    logits = logits_of(size, steps, seed)
    token, scores = seed % size, logits.astype(np.float64)
    scores -= scores.max() + math.log(np.exp(scores - scores.max()).sum())
    best = np.argsort(-logits, kind="stable")[:top].tolist()
    entries = token_logprobs(logits, token, top)
    assert list(entries) == [token, *(i for i in best if i != token)]
    for i, entry in entries.items():
        assert entry.rank == 1 + int((logits > logits[i]).sum())
        assert entry.logprob == pytest.approx(scores[i], rel=1e-12, abs=1e-12)


def test_hardly_any_of_a_vocabulary_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[int] = []
    for name in ("argsort", "partition"):
        function = getattr(np, name)
        monkeypatch.setattr(np, name, lambda a, *b, f=function, **c: handled.append(np.size(a)) or f(a, *b, **c))
    logits = np.random.default_rng(0).standard_normal(200_000).astype(np.float32) * 3
    logits[123] = 25.0
    token_logprobs(logits, 5, 20)
    for filters in ({"top_k": 50}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.95}):
        probabilities(logits.astype(np.float64), SamplingParams(temperature=0.8, **filters))  # type: ignore[arg-type]
    assert len(handled) >= 8 and max(handled) < 10_000
