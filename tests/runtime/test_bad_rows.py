"""A request that cannot be drawn from ends with an error of its own; the engine and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, Bench, bench, noisy
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.outputs import CompletionOutput
from trtllm_replayssm.runtime.sampling.params import SamplingParams

HEAD = noisy(hash_model(VOCAB), hash_model(VOCAB, salt=9), every=3)
SETTINGS = [{}, {"temperature": 1.1, "seed": 3}]
PROMPT, OTHER = [1, 2, 3], [4, 5]


def explode() -> object:
    raise ZeroDivisionError("grammar fell over")


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "raises": (explode, "ZeroDivisionError: grammar fell over"),
    "short": (lambda: np.ones(VOCAB - 1, np.bool_), rf"\[{VOCAB}\] bool"),
    "long": (lambda: np.ones(VOCAB + 1, np.bool_), rf"\[{VOCAB}\] bool"),
    "two rows": (lambda: np.ones((1, VOCAB), np.bool_), rf"\[{VOCAB}\] bool"),
    "integers": (lambda: np.ones(VOCAB, np.int64), rf"\[{VOCAB}\] bool"),
    "list": (lambda: [True] * VOCAB, rf"\[{VOCAB}\] bool"),
    "text": (lambda: "yes", rf"\[{VOCAB}\] bool"),
    "nothing allowed": (lambda: np.zeros(VOCAB, np.bool_), "at least one allowed token"),
}


class BadAfter:
    """Allows everything for `good` positions, then answers with `answer()`."""

    def __init__(self, good: int, answer: Callable[[], object], emitted: int = 0) -> None:
        self.good, self.answer, self.emitted = good, answer, emitted

    def allowed(self, drafted: Sequence[int]) -> object:
        return None if self.emitted + len(drafted) < self.good else self.answer()

    def accept(self, token: int) -> None:
        self.emitted += 1

    def fork(self) -> BadAfter:
        return BadAfter(self.good, self.answer, self.emitted)


def two(machine: Bench, **settings: Any) -> tuple[CompletionOutput, CompletionOutput]:
    """The outputs of a request with these settings, and of a harmless one beside it; nothing is left behind."""
    odd = machine.add(PROMPT, max_tokens=20, end_id=-1, **settings)
    good = machine.add(OTHER, max_tokens=20, end_id=-1, temperature=1.0, seed=8)
    done = machine.run()
    assert machine.session.free_slots == machine.session.pool.slots
    return done[odd].outputs[0], done[good].outputs[0]


def plain(prompt: list[int], **settings: Any) -> list[int]:
    return bench().one(prompt, max_tokens=20, end_id=-1, **settings).token_ids


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("good", [0, 1, 3, 6])
@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_mask_that_fails_ends_its_own_request(kind: str, case: str, good: int, settings: dict[str, float]) -> None:
    answer, message = BAD[case]
    machine = bench(kind, head_model=HEAD)
    bad, other = two(machine, logits_mask=BadAfter(good, answer), **settings)
    assert bad.finish_reason == "error" and len(bad.token_ids) == good
    with pytest.raises(AssertionError, match=f"logits_mask.*{message}"):
        raise AssertionError(bad.error)
    if kind != "mtp-sampled" or not settings:
        assert bad.token_ids == plain(PROMPT, **settings)[:good]
    assert other.finish_reason == "length" and len(other.token_ids) == 20
    if kind != "mtp-sampled":
        assert other.token_ids == plain(OTHER, temperature=1.0, seed=8)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_mask_that_cannot_follow_ends_its_own_request(kind: str) -> None:
    class Stuck(BadAfter):
        def accept(self, token: int) -> None:
            self.emitted += 1
            if self.emitted == 4:
                raise KeyError(token)

        def fork(self) -> Stuck:
            return Stuck(99, explode)

    bad, other = two(bench(kind, head_model=HEAD), logits_mask=Stuck(99, explode))
    assert bad.finish_reason == "error" and "logits_mask" in str(bad.error) and "KeyError" in str(bad.error)
    assert bad.token_ids == plain(PROMPT)[: len(bad.token_ids)] and len(bad.token_ids) >= 4
    assert other.finish_reason == "length"


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
def test_a_mask_with_nothing_to_say_behind_the_end_is_no_error(kind: str, settings: dict[str, float]) -> None:
    """Whatever was drafted behind the token that ends a request is never drawn."""
    for end in range(3, 12):
        machine = bench(kind, head_model=HEAD)
        mask = BadAfter(end, lambda: np.zeros(VOCAB, np.bool_))
        number = machine.add(PROMPT, max_tokens=end, end_id=-1, logits_mask=mask, **settings)
        output = machine.run()[number].outputs[0]
        assert output.finish_reason == "length" and len(output.token_ids) == end


@pytest.mark.parametrize("mask", [5, "abc", object(), [True]], ids=lambda mask: type(mask).__name__)
def test_a_mask_without_the_methods_of_one_is_refused(mask: object) -> None:
    with pytest.raises(RequestError, match="SamplingParams: logits_mask"):
        SamplingParams(logits_mask=mask)  # type: ignore[arg-type]


def test_a_mask_that_cannot_be_forked_is_refused() -> None:
    class Single(BadAfter):
        def fork(self) -> BadAfter:
            raise MemoryError("one only")

    machine = bench()
    with pytest.raises(RequestError, match=r"logits_mask.*MemoryError: one only"):
        machine.add(PROMPT, logits_mask=Single(9, explode))
    assert machine.one(OTHER, max_tokens=4, end_id=-1).finish_reason == "length"


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_scores_that_are_not_finite_end_their_own_request(kind: str, settings: dict[str, float]) -> None:
    """The second line of defence: the settings are set behind the back of their checks."""
    machine = bench(kind, head_model=HEAD)
    params = SamplingParams(max_tokens=20, end_id=-1, presence_penalty=1.0, frequency_penalty=1.0, **settings)  # type: ignore[arg-type]
    object.__setattr__(params, "presence_penalty", -1e308)
    object.__setattr__(params, "frequency_penalty", -1e308)
    number = machine.engine.add_request(PROMPT, params)
    good = machine.add(OTHER, max_tokens=20, end_id=-1)
    done = machine.run()
    bad = done[number].outputs[0]
    assert bad.finish_reason == "error" and "finite" in str(bad.error) and len(bad.token_ids) >= 1
    assert done[good].outputs[0].token_ids == plain(OTHER)


EXTREMES: list[dict[str, object]] = [
    {"presence_penalty": -1e4, "frequency_penalty": -1e4, "repetition_penalty": 1e-4},
    {"presence_penalty": 1e4, "frequency_penalty": 1e4, "repetition_penalty": 1e4},
    {"logit_bias": {3: 1e4, 4: -1e4}, "repetition_penalty": 1e-4},
    {"top_p": 5e-324, "min_p": 1.0},
]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-5, 1.0, 1e4])
@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_ends_of_every_range_are_sampled_from(kind: str, extreme: dict[str, object], temperature: float) -> None:
    bad, other = two(bench(kind, head_model=HEAD), temperature=temperature, seed=2, **extreme)
    assert (bad.finish_reason, len(bad.token_ids)) == ("length", 20)
    assert other.finish_reason == "length"


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_a_tiny_temperature_draws_the_best_token(temperature: float) -> None:
    assert plain(PROMPT, temperature=temperature, seed=1) == plain(PROMPT)
