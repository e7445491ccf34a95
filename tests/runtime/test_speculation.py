"""Speculation changes the number of steps and nothing else: greedy exactly, sampled one-hot exactly, general in law."""

from __future__ import annotations

import numpy as np
import pytest

from tests.runtime.fake_session import FakeSession, failing, hash_model
from tests.runtime.harness import DRAFTERS, VOCAB, Bench, bench, noisy, scripted
from trtllm_replayssm.runtime.sampling.distribution import TokenHistory, probabilities
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.speculative.drafter import Draft
from trtllm_replayssm.runtime.speculative.verify import VerifyContext, verify
from trtllm_replayssm.spec.accept import accept_general

PROMPTS = ([1], [3, 4, 5], [2, 7, 2, 7, 2], list(range(1, 18)))
HEAD = noisy(hash_model(VOCAB), hash_model(VOCAB, salt=9), every=3)
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
PENALISED = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {5: 1.0}}


def outputs(kind: str, draft_len: int, window: int, **settings: object) -> tuple[list[tuple[object, ...]], Bench]:
    machine = bench(kind, head_model=HEAD, draft_len=draft_len, window=window, chunk=5)
    for prompt in PROMPTS:
        machine.add(prompt, max_tokens=25, **settings)
    done = machine.run()
    return [(o.token_ids, o.finish_reason, o.stop_reason) for r in sorted(done) for o in done[r].outputs], machine


@pytest.mark.parametrize("draft_len, window", [(1, 2), (1, 8), (3, 4), (3, 8), (3, 16), (7, 8)])
@pytest.mark.parametrize("kind", ["ngram", "mtp", "mtp-sampled"])
@pytest.mark.parametrize("extra", [{}, PENALISED], ids=["plain", "penalised"])
def test_greedy_speculation_emits_what_greedy_decoding_emits(
    kind: str, draft_len: int, window: int, extra: dict[str, object]
) -> None:
    expected, _ = outputs("plain", draft_len, window, **extra)
    actual, machine = outputs(kind, draft_len, window, **extra)
    assert actual == expected
    assert machine.engine.stats.drafted_tokens > 0
    assert kind == "ngram" or machine.engine.stats.accepted_tokens > 10  # the test would be empty without


@pytest.mark.parametrize("kind", ["ngram", "mtp"])
@pytest.mark.parametrize("extra", [{}, PENALISED, {"min_tokens": 9}], ids=["plain", "penalised", "min_tokens"])
def test_sampled_speculation_with_one_hot_drafts_emits_what_sampled_decoding_emits_for_the_same_seed(
    kind: str, extra: dict[str, object]
) -> None:
    accepted = 0
    for seed in range(4):
        expected, _ = outputs("plain", 3, 8, seed=seed, **SAMPLED, **extra)
        actual, machine = outputs(kind, 3, 8, seed=seed, **SAMPLED, **extra)
        assert actual == expected
        accepted += machine.engine.stats.accepted_tokens
    assert kind == "ngram" or accepted > 20


def test_seeds_differ_between_requests_and_repeat_between_engines() -> None:
    first, _ = outputs("plain", 3, 8, **SAMPLED)
    again, _ = outputs("plain", 3, 8, **SAMPLED)
    assert first == again
    machine = bench(seed=1)
    same = [machine.add([1], max_tokens=20, end_id=-1, temperature=2.0) for _ in range(3)]
    done = machine.run()
    assert len({tuple(done[r].outputs[0].token_ids) for r in same}) == 3


@pytest.mark.parametrize("accepted", range(5))
def test_a12_the_base_token_is_always_committed_and_each_accepted_draft_once(accepted: int) -> None:
    script = list(range(10, 30))
    wrong = [*script[1 : 1 + accepted], *(63 for _ in range(4 - accepted)), *script[5:]]
    machine = scripted(script, draft_len=4)
    machine.engine._runner._drafter.script = [script[0], *wrong]  # type: ignore[union-attr]
    machine.add([1], max_tokens=20)
    machine.step()  # prompt
    slot = machine.engine._scheduler.resident[0].slot
    assert slot is not None
    before = machine.session.cursors(slot)
    machine.step()
    after = machine.session.cursors(slot)
    assert after.position - before.position == accepted + 1
    assert after.h == accepted + 1
    assert machine.session.live[slot].tokens == [1, *script[: accepted + 1]]
    assert machine.engine.stats.acceptance == {accepted + 1: 1}


def test_a16_a_row_that_commits_nothing_or_is_stale_leaves_the_others_right() -> None:
    script = list(range(10, 30))
    machine = scripted(script, draft_len=3)
    machine.session.model = failing(machine.session.model, first=2, length=4)
    bad, good = machine.add([2], max_tokens=20), machine.add([1], max_tokens=20)
    commits: list[list[int]] = []
    commit = machine.session.commit
    machine.session.commit = lambda a: (commits.append(list(a)), commit(a))[1]  # type: ignore[method-assign]
    done = machine.run()
    assert [0, 4] in commits
    assert done[bad].outputs[0].finish_reason == "error" and "finite" in (done[bad].outputs[0].error or "")
    assert done[bad].outputs[0].token_ids == script[:1]
    assert done[good].outputs[0].token_ids == script
    assert machine.session.free_slots == machine.session.pool.slots


@pytest.mark.parametrize("length", [4, 5, 6, 10, 11])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_i10_prompts_around_the_chunk_length_give_what_one_chunk_gives(kind: str, length: int) -> None:
    prompt = [1 + i % 7 for i in range(length)]
    chunked = bench(kind, head_model=HEAD, chunk=5).one(prompt, max_tokens=20, end_id=-1)
    whole = bench(kind, head_model=HEAD).one(prompt, max_tokens=20, end_id=-1)
    assert chunked.token_ids == whole.token_ids and len(whole.token_ids) == 20


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["ngram", "mtp"])
def test_i09_logprobs_with_speculation_are_those_without(kind: str, settings: dict[str, float]) -> None:
    plain = bench().one([3, 4, 5], max_tokens=25, logprobs=4, end_id=-1, seed=3, **settings)
    spec = bench(kind, head_model=HEAD).one([3, 4, 5], max_tokens=25, logprobs=4, end_id=-1, seed=3, **settings)
    assert spec.logprobs == plain.logprobs and plain.logprobs is not None
    total = sum(e[t].logprob for e, t in zip(plain.logprobs, plain.token_ids, strict=True))
    assert spec.cumulative_logprob == pytest.approx(total)
    for entry, token in zip(plain.logprobs, plain.token_ids, strict=True):
        assert next(iter(entry)) == token and entry[token].logprob < 0
        best = sorted(entry.values(), key=lambda e: e.rank)[:4]
        assert [e.logprob for e in best] == sorted((e.logprob for e in best), reverse=True)
        assert sum(np.exp(e.logprob) for e in entry.values()) <= 1 + 1e-9


TOY = 8  # vocabulary of the toy model
SAMPLES = 6_000


def toy_law(params: SamplingParams) -> np.ndarray:
    """Joint law [V, V] of two tokens after the base token 1 of the toy model."""
    model = hash_model(TOY, order=2, sharpness=1.0)
    first = probabilities(model([1]).astype(np.float64), params)
    second = np.stack([probabilities(model([1, t]).astype(np.float64), params) for t in range(TOY)])
    return first[:, None] * second


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 2.0}, {"temperature": 1.0, "top_p": 0.7}]
)
@pytest.mark.parametrize("sampled_drafts", [True, False])
def test_i21_two_tokens_drawn_through_verification_follow_the_model(
    settings: dict[str, float], sampled_drafts: bool
) -> None:
    """Chi-square of 64 cells, p = 1e-6; fixed seeds. Drafts come from another model; some have p = 0 under top-p."""
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    model, other = hash_model(TOY, order=2, sharpness=1.0), hash_model(TOY, order=2, sharpness=1.0, salt=5)
    q = probabilities(other([1]).astype(np.float64), params)
    rng = np.random.default_rng(0)
    counts = np.zeros((TOY, TOY))
    for seed in range(SAMPLES):
        drafted = int(rng.choice(TOY, p=q)) if sampled_drafts else int(np.argmax(q))
        draft = Draft((drafted,), q[None] if sampled_drafts else None)
        tokens: list[int] = []
        rows = np.stack([model([1]), model([1, drafted])])
        context = VerifyContext(params=params, history=TokenHistory([1]), stop_ids=frozenset(), seed=seed, position=1)
        verify(rows, draft, context, lambda t, _, tokens=tokens: tokens.append(t) or False)  # type: ignore[misc]
        if len(tokens) == 1:
            later = VerifyContext(params=params, history=TokenHistory([1]), stop_ids=frozenset(), seed=seed, position=2)
            verify(model([1, tokens[0]])[None], Draft(), later, lambda t, _, tokens=tokens: tokens.append(t) or True)  # type: ignore[misc]
        counts[tokens[0], tokens[1]] += 1
    expected = SAMPLES * toy_law(params)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi2 = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi2 < freedom + 5.2 * np.sqrt(2 * freedom) + 10


def test_sampled_drafts_are_accepted_by_the_general_rule() -> None:
    params = SamplingParams(temperature=1.0)
    model = hash_model(TOY, sharpness=1.0)
    for seed in range(100):
        drafts = (seed % TOY, (seed // TOY) % TOY)
        q = np.stack([probabilities(hash_model(TOY, salt=s)([1]).astype(np.float64), params) for s in (1, 2)])
        rows = np.stack([model([1, *drafts[:s]]) for s in range(3)])
        p = np.stack([probabilities(row.astype(np.float64), params) for row in rows])
        tokens: list[int] = []
        context = VerifyContext(params=params, history=TokenHistory([1]), stop_ids=frozenset(), seed=seed, position=1)
        verify(rows, Draft(drafts, q), context, lambda t, _, tokens=tokens: tokens.append(t) or False)  # type: ignore[misc]
        assert tuple(tokens) == accept_general(p, q, drafts, seed, 1).tokens


def test_the_fake_session_refuses_what_a_real_one_would() -> None:
    """The protocol checks that all tests of this folder lean on."""
    from trtllm_replayssm.errors import InvariantError
    from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk

    session = FakeSession(hash_model(VOCAB), slots=2, max_seq_len=8)
    slot = session.allocate(1)
    session.prefill([PrefillChunk(slot, [1, 2, 3], True)])
    with pytest.raises(InvariantError):
        session.mtp_begin([MtpRow(slot, [2, 3])])  # one follower short
    with pytest.raises(InvariantError):
        session.decode([DecodeRow(slot, [1, 2]), DecodeRow(slot, [3])])  # a slot twice
    session.decode([DecodeRow(slot, [1])])
    for call in (lambda: session.decode([DecodeRow(slot, [1])]), lambda: session.free(slot)):
        with pytest.raises(InvariantError):
            call()  # no commit yet
    session.commit([1])
    with pytest.raises(InvariantError):
        session.prefill([PrefillChunk(slot, [1] * 5, True)])  # past the limit
