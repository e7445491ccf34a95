"""What the two drafters propose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.fake_session import hash_model
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.sampling.distribution import Logits, TokenHistory, probabilities
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.speculative.drafter import DraftContext
from trtllm_replayssm.runtime.speculative.mtp import MtpDrafter
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter, last_match
from trtllm_replayssm.spec.accept import draw
from trtllm_replayssm.spec.philox import Domain, uniform

VOCAB = 8


def context(tokens: Sequence[int], room: int = 4, **changes: object) -> DraftContext:
    values: dict[str, object] = {
        "slot": 0, "tokens": list(tokens), "next_tokens": tokens[-1:], "room": room, "feed": False,
        "params": SamplingParams(), "history": TokenHistory(tokens), "stop_ids": frozenset(), "seed": 7,
    }  # fmt: skip
    return DraftContext(**(values | changes))  # type: ignore[arg-type]


def ngram(tokens: Sequence[int], *, room: int = 4, length: int = 4, size: int = 3) -> tuple[int, ...]:
    (draft,) = NGramDrafter(length, size).propose([context(tokens, room)])
    assert draft.q is None
    return draft.tokens


@pytest.mark.parametrize(
    "tokens, drafted",
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], (4, 5, 1, 2)),  # three tokens match
        ([1, 2, 9, 3, 2, 8, 1, 2], (9, 3, 2, 8)),  # "1 2" is longer than the more recent "2"
        ([7, 3, 7, 4, 7], (4, 7, 4, 7)),  # of equals the most recent, and it runs into the draft
        ([5, 5], (5, 5, 5, 5)),
        ([1, 2, 3], ()),
        ([1], ()),
    ],
)
def test_ngram_continues_the_most_recent_longest_match(tokens: list[int], drafted: tuple[int, ...]) -> None:
    assert ngram(tokens) == drafted


def test_ngram_drafts_no_more_than_the_room_or_its_own_length() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    assert ngram(tokens, room=2) == (3, 4)
    assert ngram(tokens, room=9, length=3) == (3, 4, 5)
    assert ngram(tokens, room=0) == ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5))
def test_ngram_match_is_what_a_plain_search_finds(tokens: list[int], size: int) -> None:
    expected = None
    for length in range(min(size, len(tokens) - 1), 0, -1):
        ends = [e for e in range(length - 1, len(tokens) - 1) if tokens[e - length + 1 : e + 1] == tokens[-length:]]
        if ends:
            expected = ends[-1]
            break
    assert last_match(tokens, size) == expected


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0)])
def test_drafters_refuse_lengths_below_one(arguments: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        NGramDrafter(*arguments)
    if arguments[0] == 0:
        with pytest.raises(ConfigError, match="positive"):
            MtpDrafter(Head(), 0)


class Head:
    """Counts calls; row i's logits follow from what it was fed."""

    def __init__(self) -> None:
        self.begun: list[list[tuple[int, tuple[int, ...]]]] = []
        self.fed: list[list[int]] = []
        self.model = hash_model(VOCAB, sharpness=1.0)

    def begin(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        self.begun.append([(slot, tuple(tokens)) for slot, tokens in rows])
        self.rows = [list(tokens) for _, tokens in rows]
        return [self.model(row) for row in self.rows]

    def next(self, tokens: Sequence[int]) -> list[Logits]:
        self.fed.append(list(tokens))
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        return [self.model(row) for row in self.rows]


def test_mtp_feeds_back_its_own_argmax() -> None:
    head = Head()
    (draft,) = MtpDrafter(head, 3).propose([context([1, 2, 3], room=3, next_tokens=(2, 3))])
    expected = [2, 3]
    for _ in range(3):
        expected.append(int(np.argmax(head.model(expected))))
    assert draft.tokens == tuple(expected[2:]) and draft.q is None
    assert head.begun == [[(0, (2, 3))]] and head.fed == [[t] for t in expected[2:4]]


def test_mtp_feeds_no_row_past_its_room() -> None:
    head = Head()
    drafts = MtpDrafter(head, 3).propose(
        [
            context([1], room=3, slot=0),
            context([2], room=1, slot=1),
            context([3], room=0, slot=2),  # nothing can still be emitted: the head need not run
            context([4], room=0, slot=3, feed=True),  # but a prompt's chunk must reach it
            context([5], room=7, slot=4),
        ]
    )
    assert [len(d) for d in drafts] == [3, 1, 0, 0, 3]
    assert [[slot for slot, _ in rows] for rows in head.begun] == [[3], [1], [0, 4]]
    assert [len(tokens) for tokens in head.fed] == [2, 2]


def test_sampled_drafts_come_with_the_distribution_they_were_drawn_from() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, seed=1)
    counts = np.zeros(VOCAB)
    for seed in range(3000):
        (draft,) = MtpDrafter(Head(), 2, sample=True).propose([context([1, 2], room=2, params=params, seed=seed)])
        assert draft.q is not None and draft.q.shape == (2, VOCAB)
        counts[draft.tokens[0]] += 1
    expected = probabilities(Head().model([2]).astype(np.float64), params)
    np.testing.assert_allclose(draft.q[0], expected)
    # Each count is binomial: five standard deviations fail by chance once in a million runs.
    assert (np.abs(counts - 3000 * expected) <= 5 * np.sqrt(3000 * expected * (1 - expected)) + 1e-9).all()


def test_sampled_drafts_are_keyed_by_seed_position_and_their_own_domain() -> None:
    params = SamplingParams(temperature=1.0)
    for seed in range(50):
        (draft,) = MtpDrafter(Head(), 3, sample=True).propose([context([1, 2], room=3, params=params, seed=seed)])
        assert draft.q is not None
        expected = [draw(q, uniform(seed, 2 + i, Domain.DRAFT)) for i, q in enumerate(draft.q)]
        assert list(draft.tokens) == expected


def test_greedy_requests_get_argmax_drafts_even_from_a_sampling_drafter() -> None:
    (draft,) = MtpDrafter(Head(), 2, sample=True).propose([context([1, 2], room=2)])
    (plain,) = MtpDrafter(Head(), 2).propose([context([1, 2], room=2)])
    assert draft == plain and draft.q is None


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_a_head_that_gives_nan_still_gives_drafts(params: SamplingParams) -> None:
    head = Head()
    head.model = lambda tokens: np.full(VOCAB, np.nan, np.float32)
    (draft,) = MtpDrafter(head, 3, sample=True).propose([context([1], room=3, params=params)])
    assert len(draft) == 3 and all(0 <= t < VOCAB for t in draft.tokens)
    assert draft.q is None or np.allclose(draft.q.sum(-1), 1)
