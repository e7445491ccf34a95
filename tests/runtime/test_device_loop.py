"""An engine whose decode rows run ahead on the device gives every request what the host's path gives it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.fake_session import failing, hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, Bench, PieceTokenizer, bench, noisy, scripted
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.runtime.device.entry import DeviceEntry, SamplingMode
from trtllm_replayssm.runtime.device.steps import DeviceSteps
from trtllm_replayssm.runtime.outputs import CompletionOutput
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig
from trtllm_replayssm.runtime.scheduler.output import EndRules
from trtllm_replayssm.runtime.scheduler.request import Request
from trtllm_replayssm.runtime.scheduler.scheduler import Scheduler, SchedulerConfig
from trtllm_replayssm.runtime.session.base import PrefillChunk
from trtllm_replayssm.runtime.speculative.drafter import Draft

KINDS = DRAFTERS
PROMPTS = ([1], [3, 4, 5], [2, 7, 2, 7, 2], list(range(1, 18)))
HEAD = noisy(hash_model(VOCAB), hash_model(VOCAB, salt=9), every=3)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "top_k": 5, "n": 3},
    {"stop_token_ids": [3, 9]},
    {"ignore_eos": True},
    {"temperature": 0.8, "presence_penalty": 0.3},  # needs the host
    {"logprobs": 2},  # needs the host
    {"min_tokens": 9, "temperature": 1.1},  # needs the host
]
Answer = tuple[list[int], str, str | None, str | int | None]


def answer(output: CompletionOutput) -> Answer:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


def answers(kind: str, *, ahead: bool, **options: Any) -> tuple[dict[int, list[Answer]], Bench]:
    machine = bench(kind, head_model=HEAD, chunk=5, slots=5, ahead=ahead, **options)
    for i, settings in enumerate(SETTINGS):
        for prompt in PROMPTS:
            machine.add(prompt, **{"max_tokens": 3 + 5 * i, "seed": i, **settings})
    return {number: [answer(o) for o in done.outputs] for number, done in machine.run().items()}, machine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("draft_len", "window"), [(1, 2), (3, 4), (3, 8)])
def test_texts_ends_and_counters_are_those_of_the_host(kind: str, draft_len: int, window: int) -> None:
    expected, host = answers(kind, ahead=False, draft_len=draft_len, window=window)
    actual, ahead = answers(kind, ahead=True, draft_len=draft_len, window=window)
    assert actual == expected
    assert ahead.session.free_slots == host.session.free_slots == 5
    assert ahead.session.flushes == ahead.engine.stats.flushes
    for name in ("output_tokens", "prompt_tokens"):
        assert getattr(ahead.engine.stats, name) == getattr(host.engine.stats, name)
    if kind.startswith("mtp"):
        assert ahead.engine.stats.accepted_tokens > 100
    widest = 1 if kind == "plain" else 1 + draft_len
    assert max(max(sizes) for sizes in ahead.session.decode_sizes) == widest


def test_rows_are_launched_before_the_tokens_of_the_step_before_are_read() -> None:
    machine = scripted(list(range(10, 40)), drafts=False)
    machine = bench("plain", model=machine.session.model, vocab=64, eos_ids=(), ahead=True)
    number = machine.add([1], max_tokens=6)
    seen = []
    while machine.engine.has_work:
        machine.step()
        output = machine.engine.output_of(number)
        seen.append((len(machine.session.decode_sizes), 6 if output is None else output.outputs[0].length))
    # (steps that ran, tokens that the host has): the prompt's step gives the first token
    assert seen == [(0, 1), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (5, 6)]


def test_a_row_that_ends_on_the_device_moves_nothing_in_the_step_that_was_launched_behind_it() -> None:
    script = [10, 11, 12, 13, 14, 15]
    made = scripted(script, drafts=False)
    machine = bench("plain", model=made.session.model, vocab=64, eos_ids=(12,), ahead=True)
    machine.add([1], max_tokens=20)
    done = machine.run()
    assert done[0].outputs[0].token_ids == [10, 11, 12] and done[0].outputs[0].finish_reason == "stop"
    assert len(machine.session.decode_sizes) == 2  # the third launch ran no tokens


def test_a_stop_string_is_found_late_and_nothing_behind_it_is_shown() -> None:
    tokenizer = PieceTokenizer([bytes([i]) for i in range(64)])
    script = [ord("!") + i for i in range(20)]
    made = scripted(script, drafts=False)
    machine = bench("plain", model=made.session.model, vocab=64, eos_ids=(), tokenizer=tokenizer, ahead=True)
    machine.add([1], max_tokens=20, stop="%&")
    output = machine.run()[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("!\"#$", "stop", "%&")
    assert output.token_ids == script[:6]
    assert len(machine.session.decode_sizes) == 6 and machine.session.free_slots == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_row_ends_with_an_error_and_leaves_the_others_right(kind: str) -> None:
    results = []
    for ahead in (False, True):
        machine = bench(kind, head_model=HEAD, ahead=ahead)
        machine.session.model = failing(machine.session.model, first=2, length=4)
        numbers = [machine.add([2], max_tokens=20, end_id=-1), machine.add([1], max_tokens=20, end_id=-1)]
        done = machine.run()
        results.append([[answer(o) for o in done[n].outputs] for n in numbers])
        assert machine.session.free_slots == 4 and "finite" in (done[numbers[0]].outputs[0].error or "")
    assert results[0] == results[1] and results[0][0][0][2] == "error"


@pytest.mark.parametrize("kind", KINDS)
def test_moved_out_or_through_a_file_the_text_is_the_same(kind: str, tmp_path: Any) -> None:
    settings: dict[str, Any] = {"max_tokens": 20, "temperature": 0.5, "seed": 4, "end_id": -1}
    want = answer(bench(kind, head_model=HEAD).one([2, 7, 2, 7], **settings))
    for when in range(1, 6):
        machine = bench(kind, head_model=HEAD, ahead=True)
        number = machine.add([2, 7, 2, 7], **settings)
        for _ in range(when):
            machine.step()
        machine.engine.preempt(number)
        for _ in range(2):
            machine.step()
        machine.engine.export_request(number, tmp_path / "request")
        assert answer(machine.run()[number].outputs[0]) == want
        other = bench(kind, head_model=HEAD, ahead=when % 2 == 0)
        moved = other.engine.import_request(tmp_path / "request")
        assert answer(other.run()[moved].outputs[0]) == want


def test_what_ends_while_slots_are_moved_is_reported_by_the_next_step() -> None:
    machine = bench("plain", ahead=True)
    number, other = machine.add([1], max_tokens=2, end_id=-1), machine.add([3], max_tokens=30, end_id=-1)
    machine.step()
    machine.step()  # the last token of the first request is in flight
    machine.engine.preempt(other)
    assert machine.engine.has_work and number not in machine.done
    machine.step()
    assert machine.done[number].outputs[0].finish_reason == "length"
    assert machine.run()[other].outputs[0].length == 30


def test_a_cancelled_request_s_late_tokens_are_dropped() -> None:
    machine = bench("ngram", ahead=True)
    number = machine.add([1], max_tokens=20, end_id=-1)
    for _ in range(4):
        machine.step()
    output = machine.engine.cancel(number)
    assert output is not None and output.outputs[0].finish_reason == "cancelled"
    length = output.outputs[0].length
    later = machine.add([1], max_tokens=20, end_id=-1)
    assert machine.run()[later].outputs[0].token_ids[:length] == output.outputs[0].token_ids
    assert machine.session.free_slots == 4


@pytest.mark.parametrize(("kind", "outputs"), [("plain", True), ("ngram", True), ("mtp", False)])
def test_a_prefix_cache_keeps_and_gives_what_it_would_without(kind: str, outputs: bool) -> None:
    """Prompts that begin alike, and next turns that begin with an answer; ends at tokens, lengths and stop strings."""
    results = []
    for ahead in (False, True):
        tokenizer = PieceTokenizer([bytes([97 + i]) for i in range(VOCAB)])
        machine = bench(
            kind, head_model=HEAD, ahead=ahead, tokenizer=tokenizer, max_seq_len=128, chunk=5,
            prefix=PrefixConfig(block=4, budget=1 << 20, outputs=outputs),
        )  # fmt: skip
        found = []
        for turn in range(3):
            prompt = [2, 7, 2, 7, 2, 9, 9, 1, 4, 4, *range(1, 4 + turn)]
            for extra in ({"stop_token_ids": [5]}, {"stop": ["c", "k"]}, {"temperature": 0.8, "seed": 1}):
                first = machine.one(prompt, max_tokens=12, **extra)
                found.append(answer(first))
                found.append(answer(machine.one([*prompt, *first.token_ids, 3], max_tokens=6)))
        results.append((found, machine.engine.stats.prefix.hits, machine.engine.stats.prefix.hit_tokens))
        assert machine.session.free_slots == 4 and machine.engine.stats.prefix.hits > 3
    assert results[0] == results[1]


def test_everything_is_made_before_the_first_request() -> None:
    machine = bench("plain", ahead=True)
    made: list[str] = []
    steps = machine.engine._steps
    assert steps is not None
    warm_up = steps.warm_up
    steps.warm_up = lambda: (made.append("warm-up"), warm_up())[1]  # type: ignore[method-assign,func-returns-value]
    with LLM.from_engine(machine.engine) as llm:
        output = llm.generate([1, 2], SamplingParams(max_tokens=4, end_id=-1, detokenize=False), use_tqdm=False)
    assert made == ["warm-up"] and output.outputs[0].length == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("ended", [False, True])
def test_a_launch_says_whether_the_device_had_ended_the_one_in_flight(ended: bool) -> None:
    class Event:
        def query(self) -> bool:
            return ended

    machine = bench("plain", ahead=True)
    steps = machine.engine._steps
    assert isinstance(steps, DeviceSteps)
    slot = machine.session.allocate(0)
    machine.session.prefill([PrefillChunk(slot, (1, 2), True)])
    entry = DeviceEntry(
        slot=slot, tokens=[1, 2, 3], room=9, stop_ids=[], seed=0, drafts=(), q=None, greedy=True, temperature=1.0,
        top_k=0, top_p=1.0, min_p=0.0,
    )  # fmt: skip
    steps.enter([entry])
    assert steps.launch([slot], SamplingMode.GREEDY) is False  # nothing was in flight
    steps._flights = [replace(flight, done=Event()) for flight in steps._flights]  # type: ignore[type-var]
    assert steps.launch([slot], SamplingMode.GREEDY) is ended


def test_drafts_that_the_host_does_not_see_count_in_the_plan() -> None:
    """Of sixteen tokens, three rows of four leave four for a prompt, and rows of fewer its whole chunk."""
    scheduler = Scheduler(SchedulerConfig(max_batch_size=4, max_num_tokens=16, chunk=8, max_step_tokens=4))
    choices = []
    for number in range(4):
        rules = EndRules(frozenset(), frozenset(), limit=9)
        request = Request(number, [1] * 8, SamplingParams(), seed=number, rules=rules)
        scheduler.add(request.choices[0])
        scheduler.place(request.choices[0], number)
        choices += request.choices
    for choice in choices[:3]:
        choice.prefilled = 8
        scheduler.prompt_done(choice)
        choice.draft = Draft((5,))
    planned = [sum(len(chunk.tokens) for chunk in scheduler.plan().chunks)]
    for choice in choices[:3]:
        choice.move_away(3)
        assert not choice.draft.tokens
    planned.append(sum(len(chunk.tokens) for chunk in scheduler.plan().chunks))
    for choice in choices[:3]:
        choice.move_back()
    planned.append(sum(len(chunk.tokens) for chunk in scheduler.plan().chunks))
    assert planned == [8, 4, 8]
