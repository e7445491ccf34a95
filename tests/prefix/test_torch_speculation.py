"""Prefix hits under speculation: the drafting head's keys and values, the pair that its last position waits for."""

from __future__ import annotations

import pytest
import torch

from tests.prefix.torch_engines import FORMATS, SAMPLED, WITH_HEAD, TorchBench, prompt
from tests.session.sessions import FAMILIES
from tests.tolerance import LOGIT_NOISE
from trtllm_replayssm.runtime.session.torch_session import TorchSession

CASES = [(WITH_HEAD, "mtp"), (WITH_HEAD, "mtp-sampled"), *((name, "ngram") for name in FAMILIES)]


def head_kv(session: TorchSession, slot: int, positions: int) -> list[torch.Tensor]:
    """Keys and values of the drafting head's layers, [Hkv, positions, D]."""
    layers = [layer for layer in session.pools.kv if layer >= len(session.geometry.layers)]
    return [t[slot, :, :positions].clone() for layer in layers for t in session.pools.kv[layer].tensors()]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("formats", FORMATS)
def test_a_hit_gives_the_tokens_of_a_miss(name: str, kind: str, formats: str) -> None:
    """The same seed and the same tokens, sampled, over three formats of the state."""
    ids = prompt(name, 52)
    cold = TorchBench(name, kind, block=16, formats=formats)
    want = cold.one(ids, **SAMPLED)
    warm = TorchBench(name, kind, block=16, formats=formats)
    warm.one([*ids[:48], 7, 9], max_tokens=9, seed=99, temperature=1.0)
    before = warm.engine.stats.accepted_tokens
    assert warm.one(ids, **SAMPLED).token_ids == want.token_ids
    assert warm.hits == 1 and cold.engine.stats.drafted_tokens > 0
    assert warm.engine.stats.accepted_tokens - before == cold.engine.stats.accepted_tokens


@pytest.mark.parametrize("kind", ["ngram", "mtp"])
def test_speculation_over_hits_is_plain_decoding_over_hits(kind: str) -> None:
    ids = prompt(WITH_HEAD, 52)
    tokens = []
    for each in ("plain", kind):
        bench = TorchBench(WITH_HEAD, each, block=16)
        bench.one([*ids[:48], 7, 9], max_tokens=3)
        tokens.append(bench.one(ids, max_tokens=24, end_id=-1, temperature=0.8, seed=3).token_ids)
        assert bench.hits == 1
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("follower", [7, 9])
def test_the_last_position_of_a_prefix_is_paired_with_this_prompts_next_token(follower: int) -> None:
    """The head's keys and values at a position depend on the token after it, which is not in the prefix's key."""
    ids = prompt(WITH_HEAD, 32)
    whole = [*ids, 21, 22, 23]
    cold = TorchBench(WITH_HEAD, "mtp", block=16)
    cold.add(whole, max_tokens=9, end_id=-1)
    warm = TorchBench(WITH_HEAD, "mtp", block=16)
    warm.add([*ids, follower, 4], max_tokens=9, end_id=-1)
    for _ in range(2):
        cold.step()
        warm.step()
    other = head_kv(warm.session, 0, 32)
    warm.engine.cancel(0)
    warm.add(whole, max_tokens=9, end_id=-1)
    warm.step()
    assert warm.hits == 1
    positions = len(whole) - 1
    for a, b, c in zip(
        head_kv(warm.session, 0, positions), head_kv(cold.session, 0, positions), other, strict=True
    ):
        assert torch.isfinite(a).all()
        assert float((a - b).abs().max()) <= LOGIT_NOISE * float(b.abs().max())
        assert float((a[:, 31] - c[:, 31]).abs().max()) > 0.01 * float(b.abs().max())


def test_a_chain_takes_the_pair_of_the_deeper_prefix() -> None:
    """Two prompts part right behind a shared snapshot: the second's own snapshot holds that position again."""
    shared = prompt(WITH_HEAD, 16)
    second = [*shared, *prompt(WITH_HEAD, 20, 9)]
    warm = TorchBench(WITH_HEAD, "mtp", block=16)
    warm.one([*shared, 7, 9], max_tokens=2)
    warm.one(second, max_tokens=2)
    warm.add([*second, 3], max_tokens=9, end_id=-1)
    warm.step()
    assert warm.engine.stats.prefix.hit_tokens == 16 + 32
    cold = TorchBench(WITH_HEAD, "mtp", block=16, chunk=16)
    cold.add([*second, 3], max_tokens=9, end_id=-1)
    for _ in range(3):
        cold.step()
    for a, b in zip(head_kv(warm.session, 0, 36), head_kv(cold.session, 0, 36), strict=True):
        assert float((a - b).abs().max()) <= LOGIT_NOISE * float(b.abs().max())


@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
def test_kept_outputs_hold_all_of_the_heads_keys_and_values(tokens: int) -> None:
    """Also for the last steps of an answer, after which nothing is drafted any more."""
    ids = prompt(WITH_HEAD, 20)
    warm = TorchBench(WITH_HEAD, "mtp", block=16, outputs=True)
    answer = warm.one(ids, max_tokens=tokens, end_id=-1).token_ids
    turn = [*ids, *answer, 8, 9]
    warm.add(turn, max_tokens=9, end_id=-1)
    while not warm.engine._scheduler.resident or warm.engine._scheduler.resident[0].prefilled < len(turn):
        warm.step()
    assert warm.engine.stats.prefix.hit_tokens == 20 + tokens - 1
    cold = TorchBench(WITH_HEAD, "mtp", block=16)
    cold.add(turn, max_tokens=9, end_id=-1)
    while not cold.engine._scheduler.resident or cold.engine._scheduler.resident[0].prefilled < len(turn):
        cold.step()
    positions = len(turn) - 1
    for a, b in zip(head_kv(warm.session, 0, positions), head_kv(cold.session, 0, positions), strict=True):
        assert torch.isfinite(a).all()
        assert float((a - b).abs().max()) <= 0.02 * float(b.abs().max())  # decoding rounds corrections to float16
