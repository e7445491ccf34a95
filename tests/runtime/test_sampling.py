"""Settings, distributions and log-probabilities of one row of logits."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.sampling.distribution import TokenHistory, broken, penalised, probabilities
from trtllm_replayssm.runtime.sampling.logprobs import token_logprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams

LOGITS = np.array([2.0, 1.0, 0.0, -1.0, 1.0], np.float32)
NONE: frozenset[int] = frozenset()


def history(prompt: Sequence[int] = (), output: Sequence[int] = ()) -> TokenHistory:
    counted = TokenHistory(prompt)
    for token in output:
        counted.add(token)
    return counted


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", 0), ("max_tokens", True), ("max_tokens", 1.5), ("min_tokens", -1), ("temperature", -0.1),
        ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"), ("top_k", -1), ("top_p", 1.01),
        ("min_p", -0.1), ("seed", -1), ("seed", 1 << 64), ("n", 0), ("n", 129), ("stop", ""), ("stop", ["a", ""]),
        ("stop", [1]), ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]), ("end_id", -2),
        ("repetition_penalty", 0.0), ("presence_penalty", math.inf), ("frequency_penalty", math.nan),
        ("logprobs", -1), ("logprobs", 101), ("truncate_prompt_tokens", 0), ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}), ("logit_bias", {"1": 1.0}), ("logit_bias", [1]), ("logit_bias", {1: 1.7e308}),
        ("logit_bias", {1: -10_001}), ("logit_bias", {1: 10**400}), ("stop_token_ids", 5), ("stop_token_ids", "5"),
        ("stop_token_ids", b"5"), ("temperature", 10**400), ("temperature", 1.1e4), ("temperature", 10**5000),
        ("presence_penalty", -1e308), ("presence_penalty", 10**400), ("frequency_penalty", -1e308),
        ("frequency_penalty", 1.1e4), ("repetition_penalty", 1e-320), ("repetition_penalty", 9e-5),
        ("repetition_penalty", 1.1e4), ("top_p", 10**400), ("min_p", 10**400), ("max_tokens", -(10**5000)),
        ("seed", 10**5000), ("stop", 10**5000),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_a_bad_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"SamplingParams: {field}: expected .*, got"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(RequestError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_defaults_and_greedy_follow_tensorrt_llm() -> None:
    assert SamplingParams().max_tokens == 32 and SamplingParams().greedy
    for greedy in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0.0}, {"temperature": 0.0, "top_p": 0.9}):
        assert SamplingParams(**greedy).greedy  # type: ignore[arg-type]
    for sampled in ({"temperature": 1.0}, {"top_k": 0}, {"top_k": 2}, {"top_p": 1.0}):
        assert not SamplingParams(**sampled).greedy  # type: ignore[arg-type]


def test_penalties_by_hand() -> None:
    params = SamplingParams(
        logit_bias={2: 4.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, temperature=1.0
    )
    scores = penalised(LOGITS, params, history(prompt=[0, 3], output=[1, 1]), (), NONE)
    # 0: 2/2; 1: 1/2 - .5 - 2*.25; 2: bias 4, unseen; 3: -1*2 (prompt counts for repetition only); 4: untouched
    assert scores.tolist() == [1.0, -0.5, 4.0, -2.0, 1.0]
    assert LOGITS.tolist() == [2.0, 1.0, 0.0, -1.0, 1.0]


def test_a_drafted_prefix_counts_as_output() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={1: 0.5})
    drafted = penalised(LOGITS, params, history([3], [1]), (1, 4), NONE)
    emitted = penalised(LOGITS, params, history([3], [1, 1, 4]), (), NONE)
    assert drafted.tolist() == emitted.tolist()


@pytest.mark.parametrize("output, drafted, masked", [(0, 0, True), (1, 1, True), (2, 1, False), (3, 0, False)])
def test_end_tokens_are_masked_until_the_minimum_with_drafts_counted(output: int, drafted: int, masked: bool) -> None:
    params = SamplingParams(min_tokens=3)
    scores = penalised(LOGITS, params, history(output=[4] * output), (4,) * drafted, frozenset({0, 2}))
    assert np.isneginf(scores[[0, 2]]).all() == masked and np.isfinite(scores[[1, 3, 4]]).all()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_temperature_is_a_softmax(temperature: float) -> None:
    p = probabilities(LOGITS.astype(np.float64), SamplingParams(temperature=temperature))
    expected = np.exp(LOGITS / temperature) / np.exp(LOGITS / temperature).sum()
    np.testing.assert_allclose(p, expected, rtol=1e-6)


def test_a_tiny_temperature_does_not_overflow() -> None:
    p = probabilities(np.array([1e4, 0.0, -1e4]), SamplingParams(temperature=1e-3))
    assert p.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({"top_k": 2}, [0, 1]),  # the tie of 1 and 4 goes to the lower id
        ({"top_k": 3}, [0, 1, 4]),
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.001}, [0]),
        ({"top_p": 0.6}, [0, 1]),  # 0.52, 0.19, 0.19, 0.07, 0.03
        ({"top_p": 0.75}, [0, 1, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.3, "top_p": 1.0}, [0, 1, 4]),
        ({"top_k": 3, "top_p": 0.7}, [0, 1]),  # top-p looks at what top-k left: 0.58, 0.21, 0.21
    ],
)
def test_filters_keep_what_they_should(settings: dict[str, float], kept: list[int]) -> None:
    p = probabilities(LOGITS.astype(np.float64), SamplingParams(**settings))  # type: ignore[arg-type]
    assert np.flatnonzero(p).tolist() == kept
    full = np.exp(LOGITS.astype(np.float64))
    np.testing.assert_allclose(p[kept], full[kept] / full[kept].sum(), rtol=1e-12)


def test_top_p_stops_at_the_token_that_reaches_it_exactly() -> None:
    halves = probabilities(np.zeros(2), SamplingParams(top_p=0.5))
    assert halves.tolist() == [1.0, 0.0]


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30),
    st.integers(0, 40),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_filters_never_leave_nothing_and_never_prefer_the_less_likely(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    scores = np.asarray(logits, np.float64)
    p = probabilities(scores, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    assert math.isclose(p.sum(), 1.0, rel_tol=1e-9)
    weights = np.exp(scores - scores.max())  # logits closer than float64 can tell apart here are ties
    assert p[np.argmax(weights)] > 0
    assert weights[p == 0].max(initial=0.0) <= weights[p > 0].min()


@pytest.mark.parametrize("top, ids", [(0, [2]), (1, [2, 0]), (3, [2, 0, 1, 4]), (5, [2, 0, 1, 4, 3]), (50, None)])
def test_i11_logprobs_of_zero_one_and_more_than_the_vocabulary(top: int, ids: list[int] | None) -> None:
    entries = token_logprobs(LOGITS, 2, top)
    assert next(iter(entries)) == 2
    assert list(entries) == (ids or [2, 0, 1, 4, 3])
    expected = LOGITS - np.log(np.exp(LOGITS).sum())
    for token, entry in entries.items():
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-6)
    assert {t: e.rank for t, e in entries.items() if t in (0, 1, 2, 4)}.items() <= {0: 1, 1: 2, 4: 2, 2: 4}.items()


def test_scores_of_a_token_are_one_mapping() -> None:
    entries = token_logprobs(LOGITS, 2, 3)
    assert entries == dict(entries.items()) and len(entries) == 4 and 2 in entries and 3 not in entries
    assert entries.get(3) is None and repr(entries).startswith("TokenLogprobs({2: Logprob(logprob=")
    with pytest.raises(KeyError, match="3"):
        entries[3]


def test_scores_of_a_long_answer_leave_the_garbage_collector_one_object_a_token() -> None:
    logits = np.arange(64, dtype=np.float32)
    gc.collect()
    before = len(gc.get_objects())
    answer = [token_logprobs(logits, token % 64, 20) for token in range(500)]
    gc.collect()
    assert len(gc.get_objects()) - before < 1.1 * len(answer)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_without_a_finite_best_one_are_no_distribution(value: float) -> None:
    logits = np.full(4, value, np.float32)
    with pytest.raises(RequestError, match="finite best score"):
        penalised(logits, SamplingParams(), history(), (), NONE)
    with pytest.raises(RequestError, match="positive finite total"):
        probabilities(logits.astype(np.float64), SamplingParams(temperature=1.0))


def test_logits_that_cannot_be_sampled_from_are_seen() -> None:
    good = np.zeros((2, 4), np.float32)
    assert not broken(good) and not broken(np.array([[0.0, -np.inf]]))
    for value in (np.nan, np.inf):
        bad = good.copy()
        bad[1, 2] = value
        assert broken(bad)
    assert broken(np.full((1, 3), -np.inf))
