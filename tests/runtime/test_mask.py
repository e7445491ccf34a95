"""Token masks: each drafted position has its own, rejected drafts leave no trace, and choices do not share one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, bench, noisy
from trtllm_replayssm.runtime.sampling.distribution import TokenHistory


class Cycle:
    """Allows tokens with id % 3 equal to the number of emitted tokens % 3; checks that it sees only legal ones."""

    def __init__(self, emitted: Sequence[int] = (), log: list[list[int]] | None = None) -> None:
        self.emitted = list(emitted)
        self.log = [] if log is None else log

    def allowed(self, drafted: Sequence[int]) -> NDArray[np.bool_] | None:
        tokens = [*self.emitted, *drafted]
        if any(token % 3 != i % 3 for i, token in enumerate(tokens)):
            return None
        return np.arange(VOCAB) % 3 == len(tokens) % 3

    def accept(self, token: int) -> None:
        assert token % 3 == len(self.emitted) % 3
        self.emitted.append(token)

    def fork(self) -> Cycle:
        copy = Cycle(self.emitted, self.log)
        self.log.append(copy.emitted)
        return copy


HEAD = noisy(hash_model(VOCAB), hash_model(VOCAB, salt=9), every=3)
SETTINGS = [{}, {"temperature": 1.1, "seed": 3}, {"temperature": 0.7, "top_k": 5, "seed": 4}]


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_every_emitted_token_is_allowed_and_the_mask_follows_exactly_those(
    kind: str, settings: dict[str, float]
) -> None:
    mask = Cycle()
    output = bench(kind, head_model=HEAD, eos_ids=()).one([1, 2, 3], max_tokens=40, logits_mask=mask, **settings)
    assert [token % 3 for token in output.token_ids] == [i % 3 for i in range(40)]
    assert mask.log[-1] == output.token_ids and mask.emitted == []


@pytest.mark.parametrize("kind", ["ngram", "mtp"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_masked_text_is_the_same_with_and_without_drafts(kind: str, settings: dict[str, float]) -> None:
    runs = []
    for which in ("plain", kind):
        machine = bench(which, model=hash_model(VOCAB, order=1), eos_ids=())
        runs.append(machine.one([1, 2, 3], max_tokens=40, logits_mask=Cycle(), **settings).token_ids)
    assert runs[0] == runs[1]


def test_choices_follow_masks_of_their_own() -> None:
    mask = Cycle()
    machine = bench("ngram", eos_ids=())
    number = machine.add([1, 2], n=3, temperature=1.5, seed=1, max_tokens=20, logits_mask=mask)
    outputs = [output.token_ids for output in machine.run()[number].outputs]
    assert len({tuple(tokens) for tokens in outputs}) == 3
    assert sorted(mask.log) == sorted(outputs)


def test_a_minimum_length_gives_way_where_the_mask_allows_end_tokens_only() -> None:
    class EndOnly(Cycle):
        def allowed(self, drafted: Sequence[int]) -> NDArray[np.bool_] | None:
            return np.arange(VOCAB) == 5

        def accept(self, token: int) -> None:
            assert token == 5

        def fork(self) -> EndOnly:
            return self

    output = bench(eos_ids=(5,)).one([1, 2], min_tokens=5, max_tokens=9, logits_mask=EndOnly())
    assert output.token_ids == [5] and output.finish_reason == "stop"


def test_a_forked_history_has_a_mask_of_its_own() -> None:
    history = TokenHistory((1, 2), Cycle())
    history.add(3)
    fork = history.fork()
    fork.add(1)
    assert isinstance(history.mask, Cycle) and isinstance(fork.mask, Cycle)
    assert (history.mask.emitted, fork.mask.emitted) == ([3], [3, 1])
