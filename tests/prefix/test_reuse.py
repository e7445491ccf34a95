"""Prompts that begin at snapshots, over a session without a model: same answers, fewer prompt tokens, right places."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.fake_session import STATE_BYTES, FakeSession, hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, Bench, bench, noisy
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig

MODEL = hash_model(VOCAB, sharpness=2.0)
HEAD = noisy(MODEL, hash_model(VOCAB, salt=9), every=3)
SAMPLED = {"max_tokens": 14, "end_id": -1, "temperature": 0.9, "seed": 11}


def machine(kind: str = "plain", *, outputs: bool = False, **settings: object) -> Bench:
    prefix = PrefixConfig(block=4, budget=1 << 20, outputs=outputs)
    return bench(kind, model=MODEL, head_model=HEAD, prefix=prefix, **settings)  # type: ignore[arg-type]


def alone(prompt: list[int], kind: str = "plain", **settings: object) -> list[int]:
    return bench(kind, model=MODEL, head_model=HEAD).one(prompt, **settings).token_ids


def ramp(length: int, start: int = 0) -> list[int]:
    return [1 + (start + i * 7) % 11 for i in range(length)]


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("suffix", range(1, 9))
def test_b12_b08_a_hit_with_any_suffix_gives_what_a_miss_gives(kind: str, suffix: int) -> None:
    """B12, B08: suffixes of one token up to two blocks, those shorter than the convolution included."""
    shared = ramp(8)
    bench_ = machine(kind)
    bench_.one([*shared, 9, 9], **SAMPLED)
    for start in (3, 5):
        prompt = [*shared, *ramp(suffix, start)]
        assert bench_.one(prompt, **SAMPLED).token_ids == alone(prompt, kind, **SAMPLED)
    assert bench_.engine.stats.prefix.hits == 2
    assert bench_.engine.stats.prefix.hit_tokens >= 16


def test_a_hit_runs_only_the_rest_of_the_prompt_and_says_so() -> None:
    bench_ = machine()
    bench_.one([*ramp(13)], max_tokens=2)
    number = bench_.add([*ramp(12), 5, 6, 7], max_tokens=2)
    output = bench_.run()[number]
    assert output.cached_tokens == 12
    assert bench_.session.prefill_sizes == [[12], [1], [3]]
    stats = bench_.engine.stats.as_dict()
    assert stats["prompt_tokens"] == 16
    assert (stats["prefix_lookups"], stats["prefix_hits"], stats["prefix_hit_tokens"]) == (2, 1, 12)
    assert stats["prefix_bytes"] == bench_.engine.stats.prefix.bytes > 0


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_run() -> None:
    bench_ = machine()
    for _ in range(2):
        bench_.one(ramp(12), max_tokens=2)
    assert bench_.session.prefill_sizes == [[8], [4], [4]]


def test_a_prompt_within_one_block_is_neither_cut_nor_kept() -> None:
    bench_ = machine()
    for _ in range(2):
        bench_.one(ramp(4), max_tokens=2)
    assert bench_.session.prefill_sizes == [[4], [4]] and bench_.engine.stats.prefix.insertions == 0


def test_the_place_where_two_prompts_part_serves_the_third() -> None:
    """No snapshot is taken inside the first prompt; the second shows that its beginning is shared."""
    bench_ = machine()
    system = ramp(8)
    cached = []
    for tail in (2, 3, 4):
        number = bench_.add([*system, *[tail] * 9], max_tokens=2)
        cached.append(bench_.run()[number].cached_tokens)
    assert cached == [0, 0, 8]
    assert bench_.session.prefill_sizes == [[16], [1], [8], [8], [1], [8], [1]]


def test_chunks_end_on_boundaries_and_each_such_end_is_kept() -> None:
    bench_ = machine(chunk=7)
    bench_.one(ramp(19), max_tokens=2)
    assert bench_.session.prefill_sizes == [[4], [4], [4], [4], [3]]
    assert bench_.engine.stats.prefix.insertions == 4


def test_a_chunk_end_that_nobody_asked_for_drops_no_other_snapshot() -> None:
    prefix = PrefixConfig(block=4, budget=3 * STATE_BYTES)
    bench_ = bench(model=MODEL, prefix=prefix, chunk=4, max_seq_len=200)
    bench_.one(ramp(14), max_tokens=1)
    bench_.one(ramp(100, 5), max_tokens=1)
    stats = bench_.engine.stats.prefix
    assert stats.insertions == 3 + 1  # of the second prompt's 24 chunk ends only the last boundary


def test_b16_a_chunk_that_ends_inside_a_block_is_not_kept() -> None:
    bench_ = machine(chunk=3)
    bench_.one(ramp(14), max_tokens=2)
    assert bench_.session.prefill_sizes == [[3], [1], [3], [1], [3], [1], [2]]
    assert sorted(e.position for e in bench_.engine.prefix.cache._entries.values()) == [4, 8, 12]  # type: ignore[union-attr]


def test_b16_prompts_that_share_a_steps_budget_are_kept_at_their_own_positions() -> None:
    """B16: the budget cuts the second prompt's chunk inside a block; nothing is stored there."""
    bench_ = machine(slots=2, max_num_tokens=18, draft_len=3)
    prompts = [ramp(14), ramp(21, 4)]
    numbers = [bench_.add(prompt, max_tokens=5, end_id=-1) for prompt in prompts]
    bench_.run()
    for snapshot in (e.snapshot for e in bench_.engine.prefix.cache._entries.values()):  # type: ignore[union-attr]
        assert snapshot.position % 4 == 0 and snapshot.state.position == snapshot.position  # type: ignore[attr-defined]
    for number, prompt in zip(numbers, prompts, strict=True):
        assert bench_.done[number].outputs[0].token_ids == alone(prompt, max_tokens=5, end_id=-1)
        longer = [*prompt, 2, 3]
        assert bench_.one(longer, max_tokens=5, end_id=-1).token_ids == alone(longer, max_tokens=5, end_id=-1)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_i18_choices_penalties_and_seeds_are_the_requests_own_on_a_hit(kind: str) -> None:
    """I18: n = 3 with a seed, twice: distinct, reproducible, and equal to a run without a cache."""
    settings = {**SAMPLED, "n": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 2}
    bench_ = machine(kind)
    plain = bench(kind, model=MODEL, head_model=HEAD)
    number = plain.add(ramp(10), **settings)
    wanted = plain.run()[number]
    for _ in range(2):
        number = bench_.add(ramp(10), **settings)
        outputs = bench_.run()[number].outputs
        assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted.outputs]
        assert len({tuple(o.token_ids) for o in outputs}) == 3
    assert bench_.engine.stats.prefix.hits == 1


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("first", range(1, 12))
def test_a_next_turn_begins_at_the_end_of_the_last_answer(kind: str, first: int) -> None:
    """With outputs kept: every length of the first answer, so that the ring is left with all counts of records."""
    bench_ = machine(kind, outputs=True, window=4)
    prompt = ramp(6)
    answer = bench_.one(prompt, max_tokens=first, end_id=-1).token_ids
    turn = [*prompt, *answer, 3, 1]
    number = bench_.add(turn, **SAMPLED)
    output = bench_.run()[number]
    assert output.cached_tokens == len(prompt) + first - 1
    assert output.outputs[0].token_ids == alone(turn, kind, **SAMPLED)


def test_answers_that_are_cancelled_or_broken_are_not_kept_and_broken_prompts_are_forgotten() -> None:
    """B01: state that led to NaN serves nobody else."""
    bench_ = machine(outputs=True)
    number = bench_.add(ramp(10), max_tokens=9, end_id=-1)
    bench_.step()
    bench_.step()
    bench_.step()
    bench_.engine.cancel(number)
    assert [e.position for e in bench_.engine.prefix.cache._entries.values()] == [8]  # type: ignore[union-attr]
    healthy = bench_.session.model
    bench_.session.model = lambda t: np.full(VOCAB, np.nan, np.float32)
    assert bench_.one(ramp(10), max_tokens=5).finish_reason == "error"
    assert bench_.engine.stats.prefix.entries == bench_.engine.stats.prefix.bytes == 0
    bench_.session.model = healthy
    assert bench_.one(ramp(10), **SAMPLED).token_ids == alone(ramp(10), **SAMPLED)
    assert not bench_.engine.prefix._keys  # type: ignore[union-attr]


def test_a_request_that_fails_by_its_own_mask_takes_no_prefix_from_others() -> None:
    class Nothing:
        def fork(self) -> Nothing:
            return self

        def accept(self, token: int) -> None: ...

        def allowed(self, drafted: object) -> np.ndarray:
            return np.zeros(VOCAB, bool)

    bench_ = machine()
    bench_.one(ramp(10), max_tokens=2)
    assert bench_.one(ramp(10), max_tokens=5, logits_mask=Nothing()).finish_reason == "error"
    assert bench_.engine.stats.prefix.entries == 1 and bench_.engine.stats.prefix.hits == 1


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("when", range(1, 6))
def test_a_prompt_that_began_at_a_snapshot_can_be_preempted_in_its_middle(kind: str, when: int) -> None:
    bench_ = machine(kind, chunk=4)
    bench_.one(ramp(9), max_tokens=1)
    number = bench_.add(ramp(22), **SAMPLED)
    for _ in range(when):
        bench_.step()
    bench_.engine.preempt(number)
    bench_.run()
    assert bench_.done[number].outputs[0].token_ids == alone(ramp(22), kind, **SAMPLED)
    assert bench_.done[number].cached_tokens == 8


def test_a_full_session_leaves_a_prompt_with_a_hit_queued_and_uncounted() -> None:
    bench_ = machine(slots=2)
    bench_.one(ramp(9), max_tokens=1)
    running = bench_.add([1], max_tokens=6, end_id=-1)
    bench_.step()
    blocker = bench_.session.allocate(0)
    late = bench_.add(ramp(9), max_tokens=4, end_id=-1)
    bench_.step()
    assert bench_.engine.load().waiting == 1 and bench_.engine.stats.prefix.lookups == 2
    bench_.session.free(blocker)
    bench_.run()
    assert {running, late} <= bench_.done.keys() and bench_.engine.stats.prefix.hits == 1


def test_prompts_that_begin_at_snapshots_stand_in_their_middle_by_turns() -> None:
    """Each holds states that the memory plan counts: of forty that arrive at once no more than that are begun."""
    bench_ = machine(slots=40, max_num_tokens=400)
    bench_.one([*ramp(8), 9, 9], max_tokens=1)
    prompts = [[*ramp(8), *ramp(2 + i % 7, i)] for i in range(40)]
    numbers = [bench_.add(prompt, max_tokens=9, end_id=-1) for prompt in prompts]
    done, stats = bench_.run(), bench_.engine.stats.prefix
    assert bench_.engine.config.max_unfinished == 16 == max(len(sizes) for sizes in bench_.session.prefill_sizes)
    assert stats.hits == 40 == stats.lookups - 1
    assert [done[n].outputs[0].token_ids for n in numbers] == [alone(p, max_tokens=9, end_id=-1) for p in prompts]


def test_a_long_prompt_begins_though_hits_never_end() -> None:
    """Hits that arrive in every step hold all places of unfinished prompts and give them to one another."""
    bench_ = machine(slots=24, max_num_tokens=32)
    bench_.one([*ramp(8), 9, 9], max_tokens=1)
    suffixes = iter(range(10_000))

    def hit() -> None:
        bench_.add([*ramp(8), *ramp(4, next(suffixes))], max_tokens=1, end_id=-1)

    for _ in range(16):
        hit()
    long = bench_.add([11] * 60, max_tokens=1, end_id=-1)
    for _ in range(30):
        while bench_.engine.load().waiting < 20:
            hit()
        bench_.step()
        if long in bench_.done:
            break
    assert long in bench_.done


def test_nobody_gives_up_a_slot_for_a_hit_that_may_not_begin_yet() -> None:
    bench_ = machine(slots=17, max_num_tokens=17)
    bench_.one([*ramp(8), 9, 9], max_tokens=1)
    decoding = bench_.add([5, 5], max_tokens=40, end_id=-1, priority=0.4)
    bench_.step()
    for i in range(16):
        bench_.add([*ramp(8), *ramp(20, i)], max_tokens=2, end_id=-1, priority=0.45)
    bench_.step()
    assert bench_.session.free_slots == 0 and len(bench_.session.unfinished) == 16
    urgent = bench_.add([*ramp(8), 3, 3, 3], max_tokens=1, end_id=-1, priority=0.9)
    while len(bench_.session.unfinished) == 16:
        bench_.step()
        assert bench_.engine.stats.preemptions == 0
    done = bench_.run()
    assert len(done[urgent].outputs[0].token_ids) == 1 and len(done[decoding].outputs[0].token_ids) == 40


def test_without_settings_there_is_no_cache_and_no_cut() -> None:
    bench_ = bench(model=MODEL)
    for _ in range(2):
        bench_.one(ramp(30), max_tokens=2)
    assert bench_.engine.prefix is None and bench_.session.prefill_sizes == [[30], [30]]
    assert isinstance(bench_.session, FakeSession) and bench_.engine.stats.prefix.lookups == 0
