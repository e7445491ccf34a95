"""Priorities: who gets a slot first, who gives one up, and that nobody's text depends on it."""

from __future__ import annotations

import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, Bench, bench, noisy
from trtllm_replayssm.errors import RequestError

MODEL = hash_model(VOCAB)
HEAD = noisy(MODEL, hash_model(VOCAB, salt=9), every=3)


def running(machine: Bench) -> list[int]:
    return [choice.request.request_id for choice in machine.engine._scheduler.resident]


def test_a_higher_priority_starts_first_and_equals_in_their_order() -> None:
    machine = bench(slots=1)
    machine.add([1], max_tokens=3, end_id=-1)
    machine.step()
    low, high, low2, high2 = (machine.add([2], priority=p, max_tokens=3, end_id=-1) for p in (0.2, 0.5, 0.2, 0.5))
    order: list[int] = []
    while machine.engine.has_work:
        machine.step()
        order += [n for n in machine.done if n not in order]
    assert order == [0, high, high2, low, low2]
    assert machine.engine.stats.preemptions == 0


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_higher_priority_takes_the_slot_of_the_lowest_newest_one_which_goes_on_later(kind: str) -> None:
    machine = bench(kind, model=MODEL, head_model=HEAD, slots=3, chunk=3)
    settings = {"max_tokens": 18, "end_id": -1, "temperature": 0.9}
    prompts = [[1 + i] * (3 + i) for i in range(4)]
    priorities = [0.5, 0.1, 0.1, 0.9]
    numbers = []
    for i in range(3):
        numbers.append(machine.add(prompts[i], priority=priorities[i], seed=i, **settings))
        machine.step()
    machine.step()
    numbers.append(machine.add(prompts[3], priority=priorities[3], seed=3, **settings))
    machine.step()
    assert running(machine) == [numbers[0], numbers[1], numbers[3]]
    assert machine.engine.stats.preemptions == 1
    machine.run()
    for i, number in enumerate(numbers):
        alone = bench(kind, model=MODEL, head_model=HEAD).one(prompts[i], seed=i, **settings)
        assert machine.done[number].outputs[0].token_ids == alone.token_ids


def test_equal_priorities_never_take_each_others_slots() -> None:
    machine = bench(slots=2)
    for i in range(6):
        machine.add([1 + i], priority=0.7, max_tokens=6, end_id=-1)
    machine.run()
    assert machine.engine.stats.preemptions == 0


def test_a_preempted_request_resumes_before_new_ones_of_its_priority_and_after_higher_ones() -> None:
    machine = bench(slots=1)
    low = machine.add([1], priority=0.1, max_tokens=8, end_id=-1)
    machine.step()
    high = machine.add([2], priority=0.9, max_tokens=4, end_id=-1)
    low2, middle = machine.add([3], priority=0.1, max_tokens=4, end_id=-1), machine.add([4], max_tokens=4, end_id=-1)
    order: list[int] = []
    while machine.engine.has_work:
        machine.step()
        order += [n for n in machine.done if n not in order]
    assert order == [high, middle, low, low2]


def test_no_more_are_moved_out_than_the_new_one_needs_and_none_when_that_is_no_help() -> None:
    machine = bench(slots=4)
    middle = [machine.add([1 + i], priority=0.5, max_tokens=20, end_id=-1) for i in range(2)]
    low = [machine.add([5 + i], priority=0.1, max_tokens=20, end_id=-1) for i in range(2)]
    machine.step()
    wide = machine.add([9], priority=0.4, max_tokens=4, end_id=-1, n=3, temperature=1.0)
    machine.step()
    assert machine.engine.stats.preemptions == 0 and set(running(machine)) == {*middle, *low}
    machine.engine.cancel(wide)
    machine.add([9], priority=0.4, max_tokens=4, end_id=-1, n=2, temperature=1.0)
    machine.step()
    assert machine.engine.stats.preemptions == 2 and set(running(machine)) == {*middle, wide + 1}
    machine.run()


def test_a_request_of_several_choices_gives_up_what_is_needed_and_all_of_them_end_well() -> None:
    settings = {"n": 3, "seed": 4, "temperature": 1.0, "max_tokens": 12, "end_id": -1}
    machine = bench(slots=3)
    group = machine.add([1, 2], priority=0.1, **settings)
    for _ in range(3):
        machine.step()
    machine.add([7], priority=0.9, max_tokens=3, end_id=-1)
    machine.step()
    assert machine.engine.stats.preemptions == 1 and len(running(machine)) == 3
    machine.run()
    alone = bench(slots=3)
    number = alone.add([1, 2], **settings)
    assert [o.token_ids for o in machine.done[group].outputs] == [o.token_ids for o in alone.run()[number].outputs]


def test_host_memory_holds_a_bounded_number_of_preempted_choices() -> None:
    machine = bench(slots=1, max_preempted=2)
    for i in range(6):
        machine.add([1 + i], priority=i / 10, max_tokens=30, end_id=-1)
        machine.step()
    assert machine.engine.stats.preemptions == 2 and len(machine.engine._snapshots) == 2
    machine.run()
    assert len(machine.done) == 6 and not machine.engine._snapshots


@pytest.mark.parametrize("priority", [-0.1, 1.5, float("nan"), "high", True, None])
def test_a_priority_outside_its_range_is_refused(priority: float) -> None:
    with pytest.raises(RequestError, match="priority: expected a number in"):
        bench().add([1], priority=priority)
