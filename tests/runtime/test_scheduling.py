"""Continuous batching: order, budgets, full pools, cancellation, preemption."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, Bench, PieceTokenizer, bench, noisy
from trtllm_replayssm.errors import CapacityError, ConfigError, InvariantError, RequestError
from trtllm_replayssm.runtime.scheduler.request import RequestState
from trtllm_replayssm.runtime.scheduler.scheduler import Scheduler, SchedulerConfig

HEAD = noisy(hash_model(VOCAB), hash_model(VOCAB, salt=9), every=3)


def tokens_of(machine: Bench, number: int) -> list[int]:
    return machine.done[number].outputs[0].token_ids


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_batch_gives_each_request_what_it_gets_alone(kind: str) -> None:
    prompts = [[1 + (i * j) % 9 for j in range(1 + 5 * i)] for i in range(7)]
    machine = bench(kind, head_model=HEAD, slots=3, chunk=6)
    numbers = [machine.add(p, max_tokens=15, seed=i, temperature=0.9) for i, p in enumerate(prompts)]
    machine.run()
    for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        alone = bench(kind, head_model=HEAD).one(prompt, max_tokens=15, seed=i, temperature=0.9)
        assert tokens_of(machine, number) == alone.token_ids


def test_requests_start_in_order_and_a_full_pool_queues() -> None:
    machine = bench(slots=2)
    numbers = [machine.add([1 + i], max_tokens=4, end_id=-1) for i in range(5)]
    order: list[int] = []
    while machine.engine.has_work:
        machine.step()
        assert machine.engine.load().running <= 2
        order += [n for n in machine.done if n not in order]
    assert order == numbers
    assert machine.engine.load().running == machine.engine.load().waiting == 0


def test_max_batch_size_below_the_slots_is_kept() -> None:
    machine = bench(slots=4, batch=3)
    for i in range(6):
        machine.add([1 + i], max_tokens=6, end_id=-1)
    machine.run()
    assert max(len(sizes) for sizes in machine.session.decode_sizes) == 3


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_b19_a_prompt_in_small_chunks_gives_what_one_chunk_gives(chunk: int) -> None:
    prompt = [1 + i % 5 for i in range(20)]
    machine = bench(chunk=chunk)
    assert machine.one(prompt, max_tokens=9).token_ids == bench(chunk=20).one(prompt, max_tokens=9).token_ids
    sizes = [s for step in machine.session.prefill_sizes for s in step]
    assert sizes == [chunk] * (20 // chunk) + ([20 % chunk] if 20 % chunk else [])


def test_chunks_and_decode_rows_share_the_token_budget_of_a_step() -> None:
    machine = bench(slots=3, max_num_tokens=12, draft_len=3)
    machine.add([1], max_tokens=20, end_id=-1)
    machine.step()
    machine.add([1 + i % 4 for i in range(30)], max_tokens=5, end_id=-1)
    machine.add([1 + i % 4 for i in range(12)], max_tokens=5, end_id=-1)
    machine.step()
    assert machine.session.decode_sizes[-1] == [1]
    assert machine.session.prefill_sizes[-1] == [11]  # 12 less the decode row; nothing left for the second prompt
    machine.step()
    assert machine.session.prefill_sizes[-1] == [11]
    machine.step()
    assert machine.session.prefill_sizes[-1] == [8, 3]
    machine.run()


@pytest.mark.parametrize("kind", DRAFTERS)
def test_no_step_exceeds_the_token_budget(kind: str) -> None:
    machine = bench(kind, slots=4, max_num_tokens=16, draft_len=3)
    for i in range(9):
        machine.add([1 + j % 6 for j in range(1 + 6 * i)], max_tokens=10, end_id=-1)
    seen = 0
    while machine.engine.has_work:
        rows, chunks = len(machine.session.decode_sizes), len(machine.session.prefill_sizes)
        machine.step()
        tokens = sum(map(sum, machine.session.decode_sizes[rows:])) + sum(
            map(sum, machine.session.prefill_sizes[chunks:])
        )
        assert tokens <= 16
        seen = max(seen, tokens)
    assert seen == 16


def test_a_budget_that_cannot_hold_every_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_num_tokens: expected at least .* = 4 \* 4, got 15"):
        bench("mtp", slots=4, draft_len=3, max_num_tokens=15)


def test_slots_that_others_hold_are_not_counted_for_a_requests_choices() -> None:
    machine = bench(slots=4, chunk=2)
    machine.session.allocate(0)
    wide = machine.add([1, 2, 3, 4, 5, 6], n=3, temperature=1.0, max_tokens=6, end_id=-1)
    late = machine.add([1], max_tokens=6, end_id=-1)
    machine.step()
    assert machine.engine.load().running == 1  # three of three free slots belong to the prompt's choices
    machine.run()
    assert {wide, late} == machine.done.keys()


def test_b18_a_batch_larger_than_the_slots_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="max_batch_size: expected at most the pool's slots = 2, got 5"):
        bench(slots=2, batch=5)


@pytest.mark.parametrize(
    "prompt, settings, words",
    [
        ([], {}, "empty prompt"),
        ([1] * 64, {}, "at most max_seq_len - 1 = 63 tokens, got 64"),
        ([1, VOCAB], {}, f"token ids in 0..{VOCAB - 1}, got {VOCAB}"),
        ([1, -1], {}, "token ids"),
        ([1, 2.5], {}, "token ids"),
        ("text", {}, "no tokenizer"),
        ([1], {"n": 5}, "at most 4 choices"),
        ([1], {"stop": "x"}, "no tokenizer"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"end_id": VOCAB}, "end_id"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_go_on(
    prompt: list[int], settings: dict[str, object], words: str
) -> None:
    machine = bench()
    before = machine.add([1, 2], max_tokens=8, end_id=-1)
    machine.step()
    with pytest.raises(RequestError, match=words):
        machine.add(prompt, **settings)
    after = machine.add([2, 1], max_tokens=8, end_id=-1)
    machine.run()
    assert tokens_of(machine, before) == bench().one([1, 2], max_tokens=8, end_id=-1).token_ids
    assert tokens_of(machine, after) == bench().one([2, 1], max_tokens=8, end_id=-1).token_ids


def test_a_tokenizer_with_more_ids_than_the_model_cannot_reach_the_session() -> None:
    machine = bench(tokenizer=PieceTokenizer([b"a", *[b"x"] * VOCAB, b"z"]))
    assert machine.one("aa", max_tokens=2).finish_reason is not None
    with pytest.raises(RequestError, match=f"token ids in 0..{VOCAB - 1}, got {VOCAB + 1}"):
        machine.add("az")


def test_the_longest_legal_prompt_and_a_truncated_one_run() -> None:
    assert len(bench().one([1] * 63, max_tokens=None, end_id=-1).token_ids) == 1
    truncated = bench().one([5] * 90 + [1, 2], max_tokens=4, end_id=-1, truncate_prompt_tokens=2)
    assert truncated.token_ids == bench().one([1, 2], max_tokens=4, end_id=-1).token_ids


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_cancelled_request_frees_its_slot_and_keeps_what_it_had(steps: int, kind: str) -> None:
    machine = bench(kind, head_model=HEAD, slots=2, chunk=3)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    gone = machine.add(prompt, max_tokens=30, end_id=-1)
    other = machine.add([3, 4], max_tokens=12, end_id=-1)
    for _ in range(steps):
        machine.step()
    output = machine.engine.cancel(gone)
    assert output is not None and output.finished and output.outputs[0].finish_reason == "cancelled"
    assert machine.engine.cancel(gone) is None
    machine.engine.check_integrity()
    assert len(machine.session.live) == machine.engine.load().running <= 1
    machine.run()
    assert tokens_of(machine, other) == bench().one([3, 4], max_tokens=12, end_id=-1).token_ids
    whole = bench().one(prompt, max_tokens=30, end_id=-1).token_ids
    assert output.outputs[0].token_ids == whole[: len(output.outputs[0].token_ids)]


def test_a_cancelled_request_that_waits_never_runs() -> None:
    machine = bench(slots=1)
    machine.add([1], max_tokens=5, end_id=-1)
    waiting = machine.add([2], max_tokens=5)
    machine.step()
    machine.engine.cancel(waiting)
    machine.run()
    assert machine.session.owners == [0] and waiting not in machine.done


@pytest.mark.parametrize("kind", DRAFTERS)
def test_b17_a_preempted_request_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7]
    settings = {"max_tokens": 24, "end_id": -1, "temperature": 0.9, "seed": 11}
    whole = bench(kind, head_model=HEAD, chunk=3).one(prompt, **settings).token_ids
    pending = set()
    for when in range(24):
        machine = bench(kind, head_model=HEAD, chunk=3, slots=2)
        number = machine.add(prompt, **settings)
        for _ in range(when):
            machine.step()
        for choice in machine.engine._scheduler.resident:
            pending.add(choice.pending)
        machine.engine.preempt(number)
        assert machine.session.free_slots == 2
        blocker = machine.session.allocate(0)  # so that it resumes in another slot
        if not machine.engine.has_work:
            break
        machine.run()
        assert tokens_of(machine, number) == whole
        assert machine.session.live.keys() == {blocker}
        assert not machine.engine._snapshots
    assert {0, 1, 7} <= pending or kind != "plain"  # h = 0, 1 and L - 1 were all tried


def test_preempted_requests_resume_before_new_ones_and_in_their_order() -> None:
    machine = bench(slots=2)
    first, second = machine.add([1], max_tokens=9, end_id=-1), machine.add([2], max_tokens=9, end_id=-1)
    machine.step()
    third = machine.add([3], max_tokens=9, end_id=-1)
    machine.engine.preempt(first)
    machine.engine.preempt(second)
    machine.step()
    running = [choice.request.request_id for choice in machine.engine._scheduler.resident]
    assert running == [first, second]
    machine.run()
    assert machine.engine.stats.preemptions == 2 and third in machine.done


def test_b04_a_held_slot_number_never_changes_by_itself() -> None:
    machine = bench(slots=3)
    for i in range(3):
        machine.add([1 + i], max_tokens=10 + 10 * i, end_id=-1)
    machine.step()
    held = {choice: choice.slot for choice in machine.engine._scheduler.resident}
    while machine.engine.has_work:
        machine.step()
        for choice in machine.engine._scheduler.resident:
            assert choice.slot == held[choice] and type(choice.slot) is int


def test_a_session_that_is_full_after_all_leaves_the_request_queued() -> None:
    machine = bench(slots=2)
    running = machine.add([1], max_tokens=6, end_id=-1)
    machine.step()
    allocate, machine.session.allocate = machine.session.allocate, refuse  # type: ignore[method-assign]
    late = machine.add([2], max_tokens=6, end_id=-1)
    machine.step()
    assert machine.engine.load().waiting == 1
    machine.session.allocate = allocate  # type: ignore[method-assign]
    machine.run()
    assert {running, late} <= machine.done.keys()


def test_a_session_that_is_full_with_nothing_running_is_reported() -> None:
    machine = bench(slots=2)
    machine.session.allocate = refuse  # type: ignore[method-assign]
    machine.add([1])
    with pytest.raises(CapacityError):
        machine.step()


def refuse(seed: int) -> int:
    raise CapacityError("allocate", "slot", expected="a free slot", got="none")


def test_nan_from_the_prompt_ends_that_request_only() -> None:
    machine = bench(slots=2)
    healthy = machine.session.model
    machine.session.model = lambda t: np.full(VOCAB, np.nan, np.float32) if t[0] == 9 else healthy(t)
    bad, good = machine.add([9, 1], n=2, temperature=1.0), machine.add([1, 2], max_tokens=8, end_id=-1)
    machine.run()
    assert [o.finish_reason for o in machine.done[bad].outputs] == ["error", "error"]
    assert tokens_of(machine, good) == bench().one([1, 2], max_tokens=8, end_id=-1).token_ids
    assert machine.session.free_slots == 2


def test_the_schedulers_integrity_check_sees_a_shared_slot_and_a_wrong_state() -> None:
    machine = bench(slots=2)
    machine.add([1], max_tokens=9, end_id=-1)
    machine.add([2], max_tokens=9, end_id=-1)
    machine.step()
    one, other = machine.engine._scheduler.resident
    slot, other.slot = other.slot, one.slot
    with pytest.raises(InvariantError, match="one slot each"):
        machine.engine.check_integrity()
    other.slot, other.state = slot, RequestState.WAITING
    with pytest.raises(InvariantError, match="waiting"):
        machine.engine.check_integrity()


def test_an_idle_engine_does_nothing() -> None:
    machine = bench()
    assert not machine.engine.has_work and machine.engine.step() == []
    assert machine.engine.stats.steps == 0
    assert (
        Scheduler(SchedulerConfig(max_batch_size=1, max_num_tokens=1, chunk=1, max_step_tokens=1)).plan().decode == []
    )
