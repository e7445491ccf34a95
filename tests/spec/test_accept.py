"""Acceptance: the rules on cases small enough to do by hand, and losslessness on a toy language model."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.spec.statistics import assert_drawn_from, assert_same_distribution
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.spec import accept
from trtllm_replayssm.spec.accept import Accepted, accept_general, accept_one_hot, draw, greedy_accept
from trtllm_replayssm.spec.philox import Domain, philox4x32, uniform

VOCAB = 8
SAMPLES = 100_000
SETTINGS = [(0.3, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.7)]  # temperature, top-p


def adjusted(logits: np.ndarray, temperature: float, top_p: float) -> np.ndarray:
    """Softmax at a temperature, then the smallest set of tokens whose mass reaches top_p, renormalised."""
    p = np.exp(logits / temperature - (logits / temperature).max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1, kind="stable")
    sorted_p = np.take_along_axis(p, order, -1)
    keep = np.cumsum(sorted_p, -1) - sorted_p < top_p
    np.put_along_axis(p, order, np.where(keep, sorted_p, 0.0), -1)
    return p / p.sum(-1, keepdims=True)


@cache
def uniform_table(seed: int, domain: Domain) -> list[float]:
    """`uniform(seed, position, domain)` for every position of a run, in one vectorised call."""
    counter = np.zeros((SAMPLES + 8, 4), np.uint32)
    counter[:, 2], counter[:, 3] = np.arange(SAMPLES + 8), domain
    words = philox4x32(counter, seed)
    table = ((words[:, 0] >> 5) * 67108864.0 + (words[:, 1] >> 6)) / 2.0**53
    assert [table[i] for i in (0, 77, SAMPLES)] == [uniform(seed, i, domain) for i in (0, 77, SAMPLES)]
    return [float(u) for u in table]


@pytest.fixture
def fast_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "uniform", lambda seed, position, domain: uniform_table(seed, domain)[position])


class ToyModel:
    """The next token depends on the last one: logits [V, V] of the model, and of a drafter that is often wrong."""

    def __init__(self, temperature: float, top_p: float) -> None:
        rng = np.random.default_rng(7)
        logits = rng.normal(size=(VOCAB, VOCAB)) * 1.5
        self.p = adjusted(logits, temperature, top_p)
        self.q = adjusted(logits + rng.normal(size=(VOCAB, VOCAB)), temperature, 0.8)
        self.best = self.q.argmax(-1)

    def plain(self, seed: int) -> list[int]:
        tokens = [0]
        while len(tokens) <= SAMPLES:
            tokens += accept_one_hot(self.p[tokens[-1]][None], [], seed, len(tokens)).tokens
        return tokens[: SAMPLES + 1]

    def drafted_by_argmax(self, seed: int, drafts: int) -> tuple[list[int], int]:
        tokens, accepted = [0], 0
        while len(tokens) <= SAMPLES:
            draft, last = [], tokens[-1]
            for _ in range(drafts):
                last = int(self.best[last])
                draft.append(last)
            result = accept_one_hot(self.p[[tokens[-1], *draft]], draft, seed, len(tokens))
            tokens += result.tokens
            accepted += result.accepted
        return tokens[: SAMPLES + 1], accepted

    def drafted_by_sampling(self, seed: int, drafts: int) -> tuple[list[int], int]:
        tokens, accepted = [0], 0
        while len(tokens) <= SAMPLES:
            draft, last = [], tokens[-1]
            for s in range(drafts):
                last = draw(self.q[last], uniform_table(seed, Domain.DRAFT)[len(tokens) + s])
                draft.append(last)
            before = [tokens[-1], *draft]
            result = accept_general(self.p[before], self.q[before[:-1]], draft, seed, len(tokens))
            tokens += result.tokens
            accepted += result.accepted
        return tokens[: SAMPLES + 1], accepted


def transitions(tokens: list[int]) -> np.ndarray:
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    np.add.at(counts, (np.array(tokens[:-1]), np.array(tokens[1:])), 1)
    return counts


@pytest.mark.usefixtures("fast_uniform")
@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_one_hot_drafts_give_the_tokens_of_plain_sampling_and_the_models_distribution(
    temperature: float, top_p: float
) -> None:
    model = ToyModel(temperature, top_p)
    plain = model.plain(seed=11)
    speculative, accepted = model.drafted_by_argmax(seed=11, drafts=3)
    assert speculative == plain
    assert accepted > SAMPLES // 20
    assert_drawn_from(transitions(plain), model.p)


@pytest.mark.usefixtures("fast_uniform")
@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_sampled_drafts_keep_the_models_distribution(temperature: float, top_p: float) -> None:
    model = ToyModel(temperature, top_p)
    speculative, accepted = model.drafted_by_sampling(seed=12, drafts=3)
    assert accepted > SAMPLES // 20
    assert_drawn_from(transitions(speculative), model.p)
    assert_same_distribution(transitions(speculative), transitions(model.plain(seed=13)))


def test_the_chi_square_test_notices_a_rule_that_is_not_lossless() -> None:
    model = ToyModel(1.0, 1.0)
    biased = [0]
    while len(biased) <= SAMPLES // 5:  # exact-match acceptance of a sampled draft, and p instead of the residual
        last, position = biased[-1], len(biased)
        draft = draw(model.q[last], uniform(1, position, Domain.DRAFT))
        accept = uniform(1, position, Domain.ACCEPT) * model.q[last][draft] < model.p[last][draft]
        biased.append(draft if accept else draw(model.p[last], uniform(1, position, Domain.RESIDUAL)))
    with pytest.raises(AssertionError):
        assert_drawn_from(transitions(biased), model.p)


def test_greedy_stops_at_the_first_draft_that_is_not_the_argmax() -> None:
    rows = np.eye(4)[[2, 1, 3, 0]]
    assert greedy_accept(rows, [2, 1, 3]) == Accepted((2, 1, 3, 0), 3)
    assert greedy_accept(rows, [2, 0, 3]) == Accepted((2, 1), 1)
    assert greedy_accept(np.array([2, 1, 3, 0]), [0, 1, 3]) == Accepted((2,), 0)
    assert greedy_accept(rows[:1], []) == Accepted((2,), 0)
    assert greedy_accept(rows[:1], []).committed == 1
    assert greedy_accept(np.array([[1.0, 3.0, 3.0]]), []).tokens == (1,)  # a tie goes to the lower id


def test_a_draw_never_takes_a_token_of_probability_zero() -> None:
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert draw(weights, 0.0) == 1
    assert draw(weights, np.nextafter(0.25, 0)) == 1
    assert draw(weights, 0.25) == 3
    assert draw(weights, np.nextafter(1.0, 0)) == 3
    for total in np.linspace(1.0, 1.9, 1000):
        assert draw(weights * total, np.nextafter(1.0, 0)) == 3
    assert draw(np.array([0.0, 5e-324, 0.0]), 0.9) == 1  # u times a subnormal total rounds up to the total


def test_every_token_is_drawn_with_the_number_of_its_own_position() -> None:
    p, seed, position = np.tile(np.arange(1.0, 101.0), (4, 1)), 21, 40
    own = [draw(p[0], uniform(seed, position + s, Domain.TOKEN)) for s in range(4)]
    assert len(set(own)) == 4
    assert accept_one_hot(p, own[:3], seed, position) == Accepted(tuple(own), 3)
    assert accept_one_hot(p, [own[0], 0, own[2]], seed, position) == Accepted(tuple(own[:2]), 1)
    # q = p: all drafts are accepted, and the token behind them is the one of plain decoding there
    assert accept_general(p, p[:3], [5, 6, 7], seed, position) == Accepted((5, 6, 7, own[3]), 3)
    q = np.zeros((1, 100))
    q[0, 0] = 1.0  # token 0 is drafted with certainty and nearly always rejected
    residual = np.maximum(p[0] / p[0].sum() - q[0], 0.0)
    drawn = draw(residual, uniform(seed, position, Domain.RESIDUAL))
    assert accept_general(p[:2], q, [0], seed, position) == Accepted((drawn,), 0)


def test_a_draft_of_probability_zero_is_rejected_and_one_of_the_same_distribution_accepted() -> None:
    p = np.array([[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    q = np.array([[1.0, 0.0, 0.0]])
    result = accept_general(p, q, [0], seed=3, position=9)
    assert result.accepted == 0 and result.tokens[0] in (1, 2)
    for position in range(200):
        assert accept_general(p, p[:1], [1], seed=3, position=position) == Accepted((1, 2), 1)


def test_the_residual_excludes_what_the_drafter_overweights() -> None:
    p, q = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]), np.array([[0.8, 0.1, 0.1]])
    seen = {accept_general(p, q, [0], seed=5, position=i).tokens for i in range(400)}
    assert seen == {(0, 0), (1,), (2,)}  # accepted with a bonus token; rejected: never token 0


def test_a_foreign_draft_that_neither_distribution_can_give_falls_back_to_the_model() -> None:
    p = np.array([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    result = accept_general(p, p[:1], [0], seed=3, position=9)
    assert result.accepted == 0 and result.tokens[0] in (1, 2)


def test_unnormalised_rows_act_as_their_normalised_ones() -> None:
    rng = np.random.default_rng(2)
    p, q = rng.random((4, 6)), rng.random((3, 6))
    for position in range(50):
        scaled = accept_general(p * 7.0, q * 0.25, [1, 2, 3], seed=1, position=position)
        normal = accept_general(
            p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True), [1, 2, 3], seed=1, position=position
        )
        assert scaled == normal


@pytest.mark.parametrize("bad", [np.nan, -0.1, np.inf])
def test_rows_that_are_no_distributions_are_refused(bad: float) -> None:
    p = np.full((2, 3), 1.0)
    p[1, 1] = bad
    with pytest.raises(ContractError, match="accept_one_hot: p"):
        accept_one_hot(p, [0], seed=0, position=0)
    with pytest.raises(ContractError, match="accept_general: p"):
        accept_general(p, np.ones((1, 3)), [0], seed=0, position=0)


def test_wrong_shapes_and_ids_are_refused() -> None:
    with pytest.raises(ContractError, match="p"):
        accept_one_hot(np.ones((2, 3)), [0, 1], seed=0, position=0)
    with pytest.raises(ContractError, match="q"):
        accept_general(np.ones((2, 3)), np.ones((1, 4)), [0], seed=0, position=0)
    with pytest.raises(ContractError, match=r"drafts\[0\]: expected 0..2, got 3"):
        accept_general(np.ones((2, 3)), np.ones((1, 3)), [3], seed=0, position=0)
    with pytest.raises(ContractError, match="p"):
        accept_one_hot(np.zeros((1, 3)), [], seed=0, position=0)
    with pytest.raises(ContractError, match="rows"):
        greedy_accept(np.zeros((3, 4)), [0])
