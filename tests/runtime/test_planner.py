"""The memory plan: slots follow from bytes, slots are counted as the pools hold them, refusals carry every number."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.session.sessions import NAMES, checkpoint
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.device_memory import MAX_PLANNED_BATCH, plan_replica, planned_batch
from trtllm_replayssm.runtime.options import KvCacheConfig, NGramDecodingConfig
from trtllm_replayssm.runtime.planner import GIB, plan_memory, pool_slot_bytes, prompts_in_progress
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig
from trtllm_replayssm.runtime.replica import ReplicaOptions, require_fit
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.output import EndRules
from trtllm_replayssm.runtime.scheduler.request import Choice, Request
from trtllm_replayssm.runtime.scheduler.scheduler import Scheduler, SchedulerConfig
from trtllm_replayssm.weights.presets import preset_geometry

FORMATS = {
    "plain": ReplayConfig(window=8, max_step_tokens=1), "drafted": ReplayConfig(window=16, max_step_tokens=4),
    "two": ReplayConfig(window=16, max_step_tokens=2, recurrence=StateFormat.FLOAT16, read=StateFormat.FP8),
}  # fmt: skip
NANO = preset_geometry("nemotron-3-nano-4b")
BFLOAT16 = PoolConfig(slots=1, max_seq_len=512, activation=ActivationDtype.BFLOAT16)


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("replay", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_a_slot_is_counted_as_the_pools_hold_it(name: str, replay: ReplayConfig, conventional: bool) -> None:
    if conventional:  # the baseline's states are float32
        replay = replace(replay, recurrence=StateFormat.FLOAT32, read=None)
    geometry, pool = checkpoint(name).geometry, PoolConfig(slots=3, max_seq_len=40, activation=ActivationDtype.FLOAT16)
    pools = StatePools.allocate(geometry, replay, pool, conventional=conventional, device=torch.device("cpu"))
    slot = pool_slot_bytes(geometry, replay, pool, conventional=conventional)
    held = pools.nbytes()
    state = slot.checkpoint + slot.read_copy + slot.snapshots + slot.rings
    assert {k: 3 * v for k, v in (("recurrent state", state), ("kv", slot.kv), ("cursors", slot.cursors))} == {
        name: held[name] for name in ("recurrent state", "kv", "cursors")
    }
    assert 3 * slot.conv_windows == held["convolution windows"]


@given(
    memory=st.integers(1, 200 * GIB), weights=st.integers(0, 20 * GIB), fraction=st.floats(0.1, 1.0),
    prompts=st.integers(1, 300),
)  # fmt: skip
def test_the_planned_slots_fit_and_one_more_does_not(memory: int, weights: int, fraction: float, prompts: int) -> None:
    """Each slot may have a prompt in progress, up to the most that there are."""
    plan = plan_memory(
        NANO, FORMATS["drafted"], BFLOAT16, memory=memory, weights=weights, fraction=fraction, prompts=prompts
    )
    each, n = plan.slot.total + plan.row, plan.slots
    assert n == 0 or n * each <= plan.room(n)
    assert plan.room(n + 1) < (n + 1) * each
    plan.require(n)
    with pytest.raises(ConfigError):
        plan.require(plan.slots + 1)


def test_the_refusal_names_every_number() -> None:
    plan = plan_memory(NANO, FORMATS["drafted"], BFLOAT16, memory=24 * GIB, weights=8 * GIB)
    with pytest.raises(ConfigError) as caught:
        plan.require(4000)
    message = str(caught.value)
    sizes = (plan.memory, plan.weights, plan.prompt, plan.carry, plan.reserve, plan.slot.total, plan.row)
    for number in (plan.slots, *sizes, 4000):
        assert str(number) in message
    assert "max_batch_size" in message and "max_seq_len" in message


def test_weights_that_do_not_fit_leave_no_slot() -> None:
    plan = plan_memory(NANO, FORMATS["plain"], BFLOAT16, memory=4 * GIB, weights=8 * GIB)
    assert plan.room(0) < 0 and plan.slots == 0
    with pytest.raises(ConfigError, match="at most 0 slots"):
        plan.require(1)


def test_the_table_adds_up() -> None:
    plan = plan_memory(NANO, FORMATS["two"], BFLOAT16, memory=100 * GIB, weights=8 * GIB, prompts=4)
    table = dict(plan.table())
    once = ("weights", "a pass over prompts", "states of prompts in progress")
    parts = [size for what, size in table.items() if what.startswith("slot: ")]
    assert sum(parts) == plan.slot.total + plan.row
    beside = sum(table[what] for what in (*once, "libraries and graphs"))
    assert table["for slots (90%)"] == int(0.9 * (table["free memory"] - beside))
    assert plan.need(4) == sum(table[what] for what in once) + 4 * sum(parts)
    assert plan.need(3) == plan.need(4) - sum(parts) - plan.carry
    text = "\n".join(plan.lines())
    assert f"{plan.slots:,}" in text and "conv windows" in text


def test_replay_holds_more_sequences_of_a_drafting_model_than_snapshots() -> None:
    """Four tokens a step on 139 GiB: the ratio of slots is that of the states, four to one and more."""
    replay, conventional = (
        plan_memory(NANO, FORMATS["drafted"], BFLOAT16, memory=139 * GIB, weights=8 * GIB, conventional=c)
        for c in (False, True)
    )
    assert replay.slots > 3.2 * conventional.slots > 700


def test_the_plan_of_a_host_has_no_libraries_in_reserve() -> None:
    plan = plan_replica(
        NANO, FORMATS["plain"], BFLOAT16, device="cpu", weights=0, conventional=False, prompt_tokens=64, fraction=0.9
    )
    assert plan is None or plan.reserve == 0 < plan.memory


@pytest.mark.parametrize(("memory", "batch"), [(9 * GIB, 1), (20 * GIB, 104), (139 * GIB, MAX_PLANNED_BATCH)])
def test_a_batch_that_nobody_asked_for_is_what_fits_up_to_a_cap(memory: int, batch: int) -> None:
    plan = plan_memory(NANO, FORMATS["plain"], BFLOAT16, memory=memory, weights=8 * GIB)
    assert planned_batch(plan) == batch
    assert planned_batch(plan, 7) == min(batch, 7) and planned_batch(plan, 0) == 1


def test_drawn_drafts_take_their_distributions() -> None:
    """As the device loop's registers hold them, and the step's own beside."""
    replay = FORMATS["drafted"]
    plain, drawn = (plan_memory(NANO, replay, BFLOAT16, memory=GIB, weights=0, drawn_drafts=d) for d in (False, True))
    made = Registers.allocate(7, replay.max_step_tokens - 1, 0, torch.device("cpu"), drawn_vocab=NANO.vocab)
    held = made.draft_weights.nbytes // 8
    step = 2 * replay.max_step_tokens * NANO.vocab * 4  # weights of p and of the head's logits
    assert 0 <= drawn.row - plain.row - held - step <= replay.max_step_tokens * NANO.vocab * 4


@pytest.mark.parametrize(
    ("tokens", "chunk", "slots", "prompts"),
    [(2048, None, None, 1), (2048, 2048, 8, 1), (2048, 512, None, 4), (2049, 512, 256, 5), (100, 512, 8, 1),
     (2048, 16, 8, 8), (0, None, None, 0), (0, 512, None, 0)],
)  # fmt: skip
def test_prompts_in_progress_by_hand(tokens: int, chunk: int | None, slots: int | None, prompts: int) -> None:
    assert prompts_in_progress(tokens, chunk, slots) == prompts


@pytest.mark.parametrize(
    ("tokens", "chunk", "slots", "prompts"),
    [(2048, None, 256, 16), (2048, None, 4, 4), (2048, 64, 256, 32), (0, 512, 8, 0)],
)
def test_a_prefix_cache_has_more_prompts_in_progress(tokens: int, chunk: int | None, slots: int, prompts: int) -> None:
    assert prompts_in_progress(tokens, chunk, slots, reuse=True) == prompts


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), ends=st.lists(st.integers(1, 20), min_size=30),
    batch=st.integers(1, 9), tokens=st.integers(9, 40), chunk=st.integers(1, 40), disturbed=st.booleans(),
    random=st.randoms(),
)  # fmt: skip
def test_the_scheduler_leaves_no_more_prompts_unfinished(
    lengths: list[int], ends: list[int], batch: int, tokens: int, chunk: int, disturbed: bool, random: Random
) -> None:
    """Answers of ends[i] tokens beside them take more or less of the budget from step to step. Nothing is held back as
    long as prompts run as they come; those that are cut or come back from the host in their middle wait for their turn.
    """
    most = prompts_in_progress(tokens, chunk, batch)
    config = SchedulerConfig(
        max_batch_size=batch, max_num_tokens=tokens, chunk=chunk, max_step_tokens=1, max_unfinished=most
    )
    scheduler, decoded = Scheduler(config), [0] * len(lengths)
    for i, length in enumerate(lengths):
        rules = EndRules(frozenset(), frozenset(), 100)
        choice = Request(i, [1] * length, SamplingParams(), seed=i, rules=rules).choices[0]
        if disturbed and length > 1:
            choice.cuts = (random.randint(1, length - 1),)
        scheduler.add(choice)
    for _ in range(10_000):
        if not scheduler.has_work:
            break
        if disturbed and scheduler.resident and random.random() < 0.2:
            scheduler.preempt(random.choice(scheduler.resident))
        free = [slot for slot in range(batch) if slot not in [choice.slot for choice in scheduler.resident]]
        while (choice := scheduler.next_admission(len(free))) is not None:
            scheduler.place(choice, free.pop())
        plan = scheduler.plan()
        assert plan.chunks or plan.decode
        if not disturbed:
            assert plan == Scheduler.plan(unbounded(scheduler))
        for part in plan.chunks:
            part.choice.prefilled = part.end
            if part.last:
                scheduler.prompt_done(part.choice)
        assert sum(0 < c.prefilled < len(c.request.prompt_ids) for c in scheduler.resident) <= most
        for choice in plan.decode:
            decoded[choice.request.request_id] += 1
            if decoded[choice.request.request_id] == ends[choice.request.request_id]:
                scheduler.finish(choice)
    assert not scheduler.has_work


def test_a_prompt_that_waits_to_begin_is_not_passed_by_newer_ones() -> None:
    """The unfinished one comes back from the host behind it, and ends in a step in which it has been passed over."""
    scheduler = Scheduler(
        SchedulerConfig(max_batch_size=9, max_num_tokens=100, chunk=100, max_step_tokens=1, max_unfinished=1)
    )
    slots = iter(range(1000))
    names: dict[str, Choice] = {}

    def add(name: str, length: int) -> None:
        rules = EndRules(frozenset(), frozenset(), 1)
        names[name] = Request(len(names), [1] * length, SamplingParams(), seed=0, rules=rules).choices[0]
        scheduler.add(names[name])

    def step() -> None:
        while (choice := scheduler.next_admission(9)) is not None:
            scheduler.place(choice, next(slots))
        plan = scheduler.plan()
        for part in plan.chunks:
            part.choice.prefilled = part.end
            if part.last:
                scheduler.prompt_done(part.choice)
        for choice in plan.decode:
            scheduler.finish(choice)

    add("first", 250)
    step()
    add("waits", 150)
    step()
    scheduler.preempt(names["first"])
    for number in range(12):
        add(f"newer {number}", 150)
        step()
    assert names["waits"].prefilled > 0


def unbounded(scheduler: Scheduler) -> Scheduler:
    """The same residents without a limit of unfinished prompts."""
    other = copy(scheduler)
    other.config = replace(scheduler.config, max_unfinished=1 << 30)
    return other


def test_states_of_prompts_in_progress_are_counted_in_float32() -> None:
    """Whatever the checkpoint's format: 21 layers of 96 x 80 x 128, and two layers more in a pass."""
    none, one, four = (
        plan_memory(NANO, FORMATS["two"], BFLOAT16, memory=139 * GIB, weights=0, prompts=n).need(9) for n in (0, 1, 4)
    )
    assert one - none == 23 * 96 * 80 * 128 * 4 and four - none == 4 * (one - none)


def test_a_pass_over_conventional_prompts_makes_states_of_a_layer_for_all_its_rows() -> None:
    steps, prompts = (
        plan_memory(NANO, FORMATS["plain"], BFLOAT16, memory=139 * GIB, weights=0, conventional=True, prompts=n)
        for n in (0, 1)
    )
    assert prompts.row - steps.row == 96 * 80 * 128 * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("asked", "tokens"),
    [({}, 2048), ({"prefill_chunk": 512}, 2048), ({"prefill_chunk": 128}, 2048),
     ({"max_batch_size": 1000, "speculative": NGramDecodingConfig(max_draft_len=3, max_matching_ngram_size=3)}, 4000)],
)  # fmt: skip
def test_a_replica_s_plan_counts_the_steps_and_prompts_of_its_engine(
    asked: dict[str, object], tokens: int, reuse: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "trtllm_replayssm.runtime.replica.plan_replica",
        lambda *_, prompt_tokens, prompts, **__: counted.append((prompt_tokens, prompts)),
    )
    options = ReplicaOptions(
        device=device, kv_cache=KvCacheConfig(enable_block_reuse=reuse), **{"max_batch_size": 40, **asked}  # type: ignore[arg-type]
    )
    require_fit(NANO, FORMATS["plain"], BFLOAT16, options, weights=0)
    engine = options.engine_config(PrefixConfig(budget=1) if reuse else None)
    ((passed, prompts),) = counted
    assert passed == engine.max_num_tokens == tokens and min(prompts, engine.max_batch_size) == engine.max_unfinished
