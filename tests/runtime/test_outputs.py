"""Outputs are values of one moment, and a stream of them copies each token once, however long the answer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.harness import PieceTokenizer
from trtllm_replayssm.runtime.outputs import RequestOutput, request_output
from trtllm_replayssm.runtime.sampling.logprobs import Logprob, TokenLogprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.output import EndRules
from trtllm_replayssm.runtime.scheduler.request import Request


class CountedList(list[Any]):
    """A list that counts the entries copied out of it."""

    copied = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if isinstance(place, slice):
            self.copied += len(found)
        return found

    def __iter__(self) -> Any:
        self.copied += len(self)
        return super().__iter__()


def request_of(
    prompt: list[int], limit: int, logprobs: int | None = None, tokenizer: PieceTokenizer | None = None
) -> Request:
    rules = EndRules(frozenset(), frozenset(), limit)
    params = SamplingParams(max_tokens=limit, logprobs=logprobs)
    return Request(7, prompt, params, seed=1, rules=rules, tokenizer=tokenizer)


def stream(request: Request, tokens: int) -> list[RequestOutput]:
    """An output after each token, with its diffs."""
    outputs: list[RequestOutput] = []
    for token in range(tokens):
        scored = TokenLogprobs({token: Logprob(-1.0, 1)}) if request.params.logprobs is not None else None
        request.choices[0].output.push(token, scored)
        outputs.append(request_output(request).after(outputs[-1] if outputs else None))
    return outputs


def test_an_output_stays_what_it_was_while_the_answer_grows() -> None:
    request = request_of([5, 6], 9, logprobs=1)
    outputs = stream(request, 6)
    for number, output in enumerate(outputs):
        choice = output.outputs[0]
        assert choice.token_ids == list(range(number + 1)) and choice.length == number + 1
        assert choice.token_ids_diff == [number] and choice.token_ids is choice.token_ids
        assert choice.logprobs is not None and len(choice.logprobs) == number + 1
        assert [list(entry) for entry in choice.logprobs_diff] == [[number]]
        assert output.prompt_token_ids == [5, 6]
    assert outputs[2] == outputs[2] and outputs[2].outputs[0] != outputs[3].outputs[0]
    assert "[0, 1, 2]" in repr(outputs[2].outputs[0])


def test_an_output_that_travels_holds_its_own_tokens_only() -> None:
    request = request_of([5], 9)
    first = stream(request, 3)[0]
    there = pickle.loads(pickle.dumps(first))
    assert there == first and there.outputs[0].token_ids == [0]
    assert there.outputs[0].logprobs is None and there.outputs[0].logprobs_diff == []


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda output: pickle.loads(pickle.dumps(output))])
def test_an_output_that_travels_says_what_was_new_of_its_text(travel: Callable[[RequestOutput], RequestOutput]) -> None:
    request = request_of([5], 9, tokenizer=PieceTokenizer([b"%d, " % i for i in range(9)]))
    outputs = stream(request, 4)
    there = [travel(output) for output in outputs]
    assert there == outputs
    assert [output.outputs[0].text for output in there] == ["0, ", "0, 1, ", "0, 1, 2, ", "0, 1, 2, 3, "]
    assert [output.outputs[0].text_diff for output in there] == ["0, ", "1, ", "2, ", "3, "]
    assert there[3].after(there[1]).outputs[0].text_diff == "2, 3, "


def test_what_a_reader_changes_reaches_neither_the_request_nor_the_next_output() -> None:
    request = request_of([5], 9)
    first, second = stream(request, 2)
    first.outputs[0].token_ids.append(99)
    assert second.outputs[0].token_ids == request.choices[0].output.token_ids == [0, 1]
    second.prompt_token_ids.append(98)
    assert request.prompt_ids == (5,)


def test_a_stream_copies_each_token_once() -> None:
    request, steps = request_of(list(range(50)), 500), 400
    grows = request.choices[0].output.token_ids = CountedList()
    outputs, seen = stream(request, steps), 0
    for output in outputs:
        seen += len(output.outputs[0].token_ids_diff)
    assert len({id(output.prompt_token_ids) for output in outputs}) == 1, "nor the prompt"
    assert seen == steps and grows.copied == steps, "not the whole answer at every step"
