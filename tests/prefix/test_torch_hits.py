"""Hits over whole models: the slot is the one that the same chunks leave without a cache, bit for bit, and so the text.

Rows B01, B08, B09, B12, B14, B16: what broke for others when a prefix came from a cache.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.prefix.torch_engines import FORMATS, SAMPLED, WITH_HEAD, TorchBench, digest, prompt
from tests.session.sessions import FAMILIES, assert_agree, force, open_session, start, states
from tests.tolerance import LOGIT_NOISE
from trtllm_replayssm.runtime.prefix.sizes import prompt_snapshot_bytes
from trtllm_replayssm.runtime.session.base import PrefillChunk
from trtllm_replayssm.spec.philox import choice_seed

MODELS = pytest.mark.parametrize("name", FAMILIES)


@MODELS
@pytest.mark.parametrize("formats", FORMATS)
def test_a_hit_is_the_uncached_run_with_the_same_chunks_bit_for_bit(name: str, formats: str) -> None:
    """Stochastic rounding included: the snapshot came from another seed, the roundings are this request's own."""
    ids = prompt(name, 52)
    cold = TorchBench(name, block=16, formats=formats)
    want = cold.hashes(ids, **SAMPLED)
    warm = TorchBench(name, block=16, formats=formats)
    warm.one([*ids[:48], 7, 9], max_tokens=9, seed=99, temperature=1.0)
    got = warm.hashes(ids, **SAMPLED)
    assert (cold.hits, warm.hits) == (0, 1)
    assert got == want
    assert len(want[0]) == 19 and len(set(want[0])) == 19  # after the prompt and each step; the last gave up its slot


@MODELS
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("suffix", [1, 2, 3, 15])
def test_b08_b12_short_suffixes_start_from_the_prefix_and_leave_it_as_it_was(
    name: str, formats: str, suffix: int
) -> None:
    """B08: K = 4, suffixes of one and two tokens and then decoding; B12: every length up to the block."""
    ids = prompt(name, 32)
    bench = TorchBench(name, block=16, formats=formats)
    bench.one([*ids, 3], max_tokens=2)
    before = [digest(e.snapshot) for e in bench.entries]
    for begin in (40, 70):
        whole = [*ids, *prompt(name, suffix, begin)]
        got = bench.hashes(whole, **SAMPLED)
        assert got == TorchBench(name, block=16, formats=formats).hashes(whole, **SAMPLED)
    assert bench.hits == 2 and [digest(e.snapshot) for e in bench.entries[: len(before)]] == before


@MODELS
@pytest.mark.parametrize("block", [1, 100, 127, 128, 129])
def test_b09_a_snapshot_at_any_place_equals_one_shot(name: str, block: int) -> None:
    """B09: around the scan's chunk of 64 and twice it; logits through the next steps and states against one chunk."""
    ids = prompt(name, 150)
    bench = TorchBench(name, block=block, chunk=None if block > 1 else 1)
    bench.one([*ids[:block], 5], max_tokens=1)
    assert [e.position for e in bench.entries] == [block]
    entry = bench.entries[0]
    slot = bench.session.restore(entry.snapshot, seed=1)
    got = bench.session.prefill([PrefillChunk(slot, ids[block:], True)])[0]
    one_shot = open_session(name, max_seq_len=192)
    other, want = start(one_shot, ids)
    assert got is not None and np.abs(got - want).max() <= LOGIT_NOISE
    for a, b in zip(states(bench.session, slot), states(one_shot, other), strict=True):
        assert float((a - b).abs().max()) <= LOGIT_NOISE * float(b.abs().max())
    assert_agree(name, force(bench.session, slot, ids[:9]), force(one_shot, other, ids[:9]))


@MODELS
def test_b14_keys_and_values_without_their_state_are_no_hit(name: str) -> None:
    """B14: the state of a shorter prefix is dropped while its keys and values stay for a longer one."""
    ids = prompt(name, 40)
    bench = TorchBench(name, block=16, chunk=16)
    bench.one(ids, max_tokens=2)
    first, second = bench.entries
    cache = bench.engine.prefix.cache  # type: ignore[union-attr]
    cache._drop_state(first)
    cache.check_integrity()
    assert first.size == first.kv_size > 0 and bench.entries == [first, second]
    other = [*ids[:16], *prompt(name, 9, 60)]
    assert bench.hashes(other, **SAMPLED) == TorchBench(name, block=16, chunk=16).hashes(other, **SAMPLED)
    assert bench.hits == 0 and first.has_state  # run again, and its state taken in again on the way
    assert bench.hashes(ids, **SAMPLED) == TorchBench(name, block=16, chunk=16).hashes(ids, **SAMPLED)
    assert bench.hits == 1


@MODELS
def test_b16_what_two_prompts_leave_that_share_a_step_is_what_their_keys_say(name: str) -> None:
    bench = TorchBench(name, block=16, chunk=20)
    prompts = [prompt(name, 60), prompt(name, 75, 33)]
    for ids in prompts:
        bench.add(ids, max_tokens=3, end_id=-1)
    bench.run()
    assert {e.position for e in bench.entries} == {16, 32, 48, 64}
    for entry in bench.entries:
        snapshot = entry.snapshot
        owner = next(p for p in prompts if bench.key(p[: entry.position]) == entry.key)
        before = [part.snapshot for part in entry.chain()]
        slot = bench.session.restore(snapshot, before=before)
        assert bench.session.cursors(slot).position == snapshot.position == entry.position
        last = bench.session.prefill([PrefillChunk(slot, owner[entry.position :], True)])[0]
        bench.session.free(slot)
        alone = open_session(name, max_seq_len=192)
        _, want = start(alone, owner)
        assert last is not None and np.abs(last - want).max() <= LOGIT_NOISE


@MODELS
@pytest.mark.parametrize("formats", ["float32", "float16-nvfp4"])
def test_b01_a_reused_slot_and_a_cache_know_nothing_of_unrelated_prompts(name: str, formats: str) -> None:
    bench = TorchBench(name, block=16, formats=formats, slots=1)
    canary, ids = prompt(name, 50), prompt(name, 50, 5)
    bench.one(canary, max_tokens=12, end_id=-1)
    assert bench.hashes(ids, **SAMPLED) == TorchBench(name, block=16, formats=formats, slots=1).hashes(ids, **SAMPLED)
    assert bench.hits == 0


@MODELS
def test_b01_state_that_ended_in_nan_serves_nobody(name: str) -> None:
    bench = TorchBench(name, block=16, slots=1)
    ids = prompt(name, 50)
    number = bench.add(ids, max_tokens=30, end_id=-1)
    bench.step()
    carry = bench.session.pools.carries[0]
    bench.session.pools.carries[0] = {layer: torch.full_like(state, float("nan")) for layer, state in carry.items()}
    bench.run()
    assert bench.done[number].outputs[0].finish_reason == "error" and bench.entries == []
    assert bench.hashes(ids, **SAMPLED) == TorchBench(name, block=16, slots=1).hashes(ids, **SAMPLED)


@MODELS
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("tokens", [2, 8, 9, 10])
def test_a_pending_ring_is_carried_into_the_next_turn(name: str, formats: str, tokens: int) -> None:
    """Kept outputs: the snapshot holds h records; the next turn equals a slot that simply went on."""
    ids = prompt(name, 20)
    bench = TorchBench(name, block=16, formats=formats, outputs=True)
    answer = bench.one(ids, max_tokens=tokens, end_id=-1, seed=5).token_ids
    entry = bench.entries[-1]
    assert entry.position == 20 + tokens - 1
    again = bench.session.restore(entry.snapshot, before=[p.snapshot for p in entry.chain()])
    assert bench.session.cursors(again).h == {2: 1, 8: 7, 9: 8, 10: 1}[tokens]
    bench.session.free(again)
    turn = [*ids, *answer, *prompt(name, 4, 50)]
    got = bench.hashes(turn, max_tokens=2, end_id=-1, seed=5)[0][0]
    assert bench.engine.stats.prefix.hit_tokens == entry.position

    plain = TorchBench(name, formats=formats).session
    slot = plain.allocate(choice_seed(5, 0))
    for begin, end in ((0, 16), (16, 20)):
        plain.prefill([PrefillChunk(slot, ids[begin:end], end == 20)])
    force(plain, slot, answer[:-1])
    cuts = [32] if entry.position < 32 < len(turn) else []
    for begin, end in zip([entry.position, *cuts], [*cuts, len(turn)], strict=True):
        plain.prefill([PrefillChunk(slot, turn[begin:end], end == len(turn))])
    assert plain.pools.slot_hash(slot) == got


@MODELS
@pytest.mark.parametrize("head", [False, True])
def test_the_bytes_of_nested_prefixes_are_their_states_and_their_keys_and_values_once(name: str, head: bool) -> None:
    name = WITH_HEAD if head else name
    bench = TorchBench(name, block=16, chunk=16, kind="mtp" if head else "plain")
    bench.one(prompt(name, 50), max_tokens=2)
    size = prompt_snapshot_bytes(bench.session.geometry, bench.session.replay, bench.session.pool.activation)
    assert [e.size for e in bench.entries] == [size.total(16), size.total(17), size.total(17)]
    assert bench.engine.stats.prefix.bytes == 3 * size.total(0) + 50 * size.kv_per_token
