"""n > 1: one prompt, several answers, each on its own."""

from __future__ import annotations

import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, bench, noisy, scripted
from trtllm_replayssm.spec.philox import choice_seed

HEAD = noisy(hash_model(VOCAB), hash_model(VOCAB, salt=9), every=3)
SETTINGS = {"max_tokens": 25, "temperature": 1.3, "seed": 5, "n": 4}


@pytest.mark.parametrize("kind", DRAFTERS)
def test_i18_choices_are_distinct_reproducible_and_end_on_their_own(kind: str) -> None:
    runs = []
    for _ in range(2):
        machine = bench(kind, head_model=HEAD, chunk=4)
        number = machine.add([1, 2, 3, 4, 5, 6], **SETTINGS)
        runs.append([(o.index, o.token_ids, o.finish_reason) for o in machine.run()[number].outputs])
        assert machine.session.free_slots == 4
    assert runs[0] == runs[1]
    assert [index for index, _, _ in runs[0]] == [0, 1, 2, 3]
    assert len({tuple(tokens) for _, tokens, _ in runs[0]}) == 4
    lengths = {len(tokens) for _, tokens, _ in runs[0]}
    assert len(lengths) > 1 and {"stop"} <= {reason for _, _, reason in runs[0]}


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp"])
def test_i18_each_choice_is_what_its_own_seed_gives_alone(kind: str) -> None:
    machine = bench(kind, head_model=HEAD)
    number = machine.add([1, 2, 3], **SETTINGS)
    for output in machine.run()[number].outputs:
        alone = {**SETTINGS, "n": 1, "seed": choice_seed(5, output.index)}
        assert output.token_ids == bench(kind, head_model=HEAD).one([1, 2, 3], **alone).token_ids


def test_i18_the_prompt_runs_once_and_states_are_forked_not_shared() -> None:
    machine = bench("plain", chunk=4)
    machine.add([1, 2, 3, 4, 5, 6], **SETTINGS)
    machine.step()
    machine.step()
    assert machine.session.prefill_sizes == [[4], [2]]
    slots = [choice.slot for choice in machine.engine._scheduler.resident]
    assert len(slots) == len(set(slots)) > 1
    assert sorted(machine.session.live) == sorted(slots)
    seeds = [machine.session.cursors(slot).seed for slot in slots if slot is not None]
    assert seeds == [choice.seed for choice in machine.engine._scheduler.resident]
    assert len({id(s.tokens) for s in machine.session.live.values()}) == len(slots)


def test_slots_for_every_choice_are_kept_free_while_the_prompt_runs() -> None:
    machine = bench(slots=4, chunk=2)
    wide = machine.add([1, 2, 3, 4, 5, 6], n=3, temperature=1.0, max_tokens=6, end_id=-1)
    narrow = [machine.add([i], max_tokens=6, end_id=-1) for i in (1, 2, 3)]
    machine.step()
    assert machine.engine.load().running == 2  # the prompt stands for three, one more fits
    while machine.engine.has_work:
        machine.step()
        assert machine.engine.load().running <= 4
    assert {wide, *narrow} == machine.done.keys()


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_request_with_choices_can_be_preempted_and_cancelled_as_one(at: int) -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    expected = bench("mtp", chunk=2)
    number = expected.add(prompt, **SETTINGS)
    whole = [o.token_ids for o in expected.run()[number].outputs]
    machine = bench("mtp", chunk=2)
    number = machine.add(prompt, **SETTINGS)
    for _ in range(at):
        machine.step()
    machine.engine.preempt(number)
    assert machine.session.free_slots == 4
    assert [o.token_ids for o in machine.run()[number].outputs] == whole
    machine = bench("mtp", chunk=2)
    number = machine.add(prompt, **SETTINGS)
    for _ in range(at):
        machine.step()
    output = machine.engine.cancel(number)
    assert output is not None and "cancelled" in {o.finish_reason for o in output.outputs}
    assert machine.session.free_slots == 4 and not machine.engine.has_work


def test_a_choice_that_ends_with_its_first_token_leaves_the_others_running() -> None:
    machine = scripted(list(range(10, 30)))
    machine.session.model = hash_model(64, sharpness=0.0)  # all tokens equally likely: first tokens differ
    seen = {}
    for seed in range(8):
        machine.add([1], n=3, seed=seed, max_tokens=5, temperature=1.0, stop_token_ids=list(range(0, 32)))
    for number, output in machine.run().items():
        seen[number] = [len(o.token_ids) for o in output.outputs]
    assert any(lengths[0] == 1 and max(lengths) > 1 for lengths in seen.values())
    assert machine.session.free_slots == machine.session.pool.slots
