"""Prompts in chunks equal prompts in one piece, and a later chunk continues after decoded tokens (B09, B19, I10)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.session.sessions import FAMILIES, NAMES, assert_agree, force, hashes, open_session, sequence, start, states
from tests.tolerance import CORRECTION_LOGIT_NOISE, CORRECTION_NOISE, LOGIT_NOISE
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession


def in_chunks(session: TorchSession, ids: list[int], size: int, seed: int = 1) -> tuple[int, Logits]:
    slot, logits = session.allocate(seed), None
    for begin in range(0, len(ids), size):
        last = begin + size >= len(ids)
        logits = session.prefill([PrefillChunk(slot, ids[begin : begin + size], last)])[0]
        assert (logits is not None) == last
        assert session.cursors(slot).position == min(begin + size, len(ids))
    assert logits is not None
    return slot, logits


def long_prompt(name: str, length: int) -> list[int]:
    ids = sequence(name)
    return [ids[(7 * i) % len(ids)] for i in range(length)]


def assert_same_states(a: TorchSession, b: TorchSession, slots: tuple[int, int], relative: float) -> None:
    for x, y in zip(states(a, slots[0]), states(b, slots[1]), strict=True):
        assert float((x - y).abs().max()) <= relative * float(y.abs().max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3, 16, 39])
def test_b19_a_prompt_in_chunks_equals_one_shot_and_goes_on_alike(name: str, size: int) -> None:
    """B19, B11: one sequence, chunks shorter than K - 1 included; then decoding, which sees conv taps and states."""
    ids = sequence(name)
    whole, parts = open_session(name), open_session(name)
    slot, want = start(whole, ids[:40])
    other, got = in_chunks(parts, ids[:40], size)
    assert np.abs(got - want).max() <= LOGIT_NOISE
    assert_same_states(parts, whole, (other, slot), LOGIT_NOISE)
    assert_agree(name, force(parts, other, ids[40:50]), force(whole, slot, ids[40:50]))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129])
def test_i10_prompt_lengths_around_the_scan_chunk(name: str, length: int) -> None:
    """I10, B09: one below, at and above the scan's chunk, and splits there, are finite and equal."""
    ids = long_prompt(name, length)
    whole, parts = open_session(name), open_session(name)
    slot, want = start(whole, ids)
    assert np.isfinite(want).all()
    for size in (length - 1, 50):
        other, got = in_chunks(parts, ids, size)
        assert np.abs(got - want).max() <= LOGIT_NOISE
        assert_same_states(parts, whole, (other, slot), LOGIT_NOISE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decoded", [1, 3, 9])
def test_a_chunk_after_decoded_tokens_folds_them_first(name: str, decoded: int) -> None:
    """A second turn: pending records, a wrapped ring, then more prompt; equal to one prompt of all of it."""
    ids = sequence(name)
    pools: list[dict[str, Any]] = [{}, {"read": StateFormat.NVFP4}]
    for formats in pools:
        session, plain = open_session(name, **formats), open_session(name, **formats)
        slot, _ = start(session, ids[:20])
        force(session, slot, ids[20 : 20 + decoded])
        got = [session.prefill([PrefillChunk(slot, ids[20 + decoded : 40], False)])[0]]
        got.append(session.prefill([PrefillChunk(slot, ids[40:45], True)])[0])
        cursors = session.cursors(slot)
        assert (cursors.origin, cursors.h, cursors.position) == (0, 0, 45)
        other, want = start(plain, ids[:45])
        assert got[0] is None and got[1] is not None
        if name.startswith("nemotron") and not formats:
            assert np.abs(got[1] - want).max() <= LOGIT_NOISE
            assert_same_states(session, plain, (slot, other), LOGIT_NOISE)
        else:  # decoded tokens were read from a low-precision copy, or their corrections rounded to float16
            assert np.abs(got[1] - want).max() <= 2 * CORRECTION_LOGIT_NOISE[1]
            assert_same_states(session, plain, (slot, other), 40 * CORRECTION_NOISE)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_last_chunk_rounds(name: str) -> None:
    """FP8 to nearest: forty one-token chunks end where one chunk of forty does, up to float32; no rounding between."""
    ids = sequence(name)
    formats: dict[str, Any] = {"recurrence": StateFormat.FP8, "recurrence_rounding": Rounding.NEAREST}
    whole, parts = open_session(name, **formats), open_session(name, **formats)
    slot, _ = start(whole, ids[:40])
    other, _ = in_chunks(parts, ids[:40], 1)
    exact = open_session(name)
    third, _ = start(exact, ids[:40])
    for layer, state in parts.pools.ssm.items():
        codes = [s.checkpoint.data.view(torch.uint8) for s in (state, whole.pools.ssm[layer])]  # type: ignore[union-attr]
        same = (codes[0][other] == codes[1][slot]).double().mean()
        assert same > 0.99, float(same)  # an element on a rounding border may go the other way
    for a, b in zip(states(whole, slot), states(exact, third), strict=True):
        assert (a != b).double().mean() > 0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_a_slot_cannot_decode_between_its_chunks_and_others_can(name: str) -> None:
    ids = sequence(name)
    session = open_session(name)
    ready, _ = start(session, ids[:9])
    slot = session.allocate(2)
    session.prefill([PrefillChunk(slot, ids[:10], False)])
    before = hashes(session)
    with pytest.raises(ContractError, match="prompt in progress"):
        session.decode([DecodeRow(ready, [5]), DecodeRow(slot, [5])])
    assert hashes(session) == before
    force(session, ready, ids[9:14])
    got = session.prefill([PrefillChunk(slot, ids[10:20], True)])[0]
    _, want = start(open_session(name), ids[:20])
    assert got is not None and np.abs(got - want).max() <= LOGIT_NOISE
    session.decode([DecodeRow(slot, [5])])


def test_a_batch_of_ragged_prompts_equals_each_alone() -> None:
    """D15: prompts of 1, 40 and 9 tokens packed into one call, one of them not the last chunk."""
    for name in NAMES:
        ids = sequence(name)
        together = open_session(name)
        slots = [together.allocate(i) for i in range(3)]
        parts = [ids[:1], ids[:40], ids[20:29]]
        lasts = [True, True, False]
        got = together.prefill([PrefillChunk(s, p, e) for s, p, e in zip(slots, parts, lasts, strict=True)])
        together.prefill([PrefillChunk(slots[2], ids[29:31], True)])
        parts[2] = ids[20:31]
        for slot, part, logits in zip(slots, parts, got, strict=True):
            alone = open_session(name)
            other, want = start(alone, part)
            assert logits is None or np.abs(logits - want).max() <= LOGIT_NOISE
            assert_same_states(together, alone, (slot, other), LOGIT_NOISE)
            assert all(torch.isfinite(s).all() for s in states(together, slot))
