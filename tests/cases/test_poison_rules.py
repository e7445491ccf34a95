"""The poison rules: whatever nobody may read is NaN or infinite, and no result, state or foreign byte changes.

A02 ring records outside the committed range, A04 pools that start as NaN and a ring row that is read and overwritten in
one step, C04 both sentinels of a padding row in every operation, C05 padded rows of every input, and outputs that are
zero rather than left over; the same on whole models (free slots, dead records, taps, KV, padded token rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import CPU, KINDS, NAN, Layer, random_tokens, same
from tests.session.sessions import force, hashes, open_session, sequence, start
from tests.tolerance import CORRECTION_NOISE, RECURRENCE_NOISE
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops.layer_state import CursorTensors
from trtllm_replayssm.ops.reference.conv1d import conv1d_update
from trtllm_replayssm.ops.reference.rows import step_rows
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.shapes import SsmKind

POOLS: list[dict[str, Any]] = [{}, {"recurrence": StateFormat.FP8, "read": StateFormat.NVFP4}]
INF = float("inf")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", POOLS, ids=["float32", "two-precisions"])
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_a02_dead_records_never_reach_a_result(kind: SsmKind, pool: dict[str, Any], garbage: float) -> None:
    """A02: NaN, infinities or huge values beyond h and in the rejected tail, T = 1..6; the bits of zeros there."""
    config = ReplayConfig(window=7, max_step_tokens=6, **pool)
    dirty, clean = (Layer(ssm_shape(kind), config, poisoned=False) for _ in range(2))
    for step in range(18):
        width = step % 6 + 1
        tokens = random_tokens(dirty.shape, 1, width, seed=step)
        for layer, value in ((dirty, garbage), (clean, 0.0)):
            dead = layer.places(0, int(layer.cursors.h[0]), config.ring_rows)
            for ring in layer.state.ring_tensors():
                ring[0, :, dead] = value
        accepted = [(step * 5) % (width + 1)]
        assert torch.equal(dirty.step(tokens, accepted=accepted), clean.step(tokens, accepted=accepted))
        assert same(dirty.committed(0), clean.committed(0)) and same(dirty.checkpoints(0), clean.checkpoints(0))
        assert dirty.cursor(0) == clean.cursor(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a04_a_step_that_fills_the_ring_reads_each_record_before_it_is_overwritten(kind: SsmKind) -> None:
    """A04: L = T_max, so a full step behind a full window uses every ring row, in a pool that starts as NaN.

    The same tokens one by one overwrite every record only long after it was folded.
    """
    config = ReplayConfig(window=4, max_step_tokens=4)
    full, single = Layer(ssm_shape(kind), config), Layer(ssm_shape(kind), config)
    for ring in (*full.state.ring_tensors(), *single.state.ring_tensors()):
        ring.fill_(NAN)
    noise = RECURRENCE_NOISE if kind is SsmKind.MAMBA2 else CORRECTION_NOISE
    for step in range(12):
        tokens = random_tokens(full.shape, 1, 4, seed=step)
        together = full.step(tokens)
        apart = single.run(tokens, [1] * 4)
        assert float((together - apart).abs().max()) <= noise * float(apart.abs().max())
        assert full.cursor(0)[1] == 4
        state, other = full.fold(0), single.fold(0)
        assert float((state - other).abs().max()) <= noise * float(other.abs().max())


def operations(kind: SsmKind) -> Iterator[Layer]:
    for conventional in (False, True):
        yield Layer(ssm_shape(kind), ReplayConfig(window=4, max_step_tokens=3), 3, conventional=conventional)


@pytest.mark.parametrize("kind", KINDS)
def test_c04_c05_padding_rows_write_nothing_and_output_zero(kind: SsmKind) -> None:
    """C04, C05: -1 is the one sentinel, 0 a slot like any other; other negative numbers are refused. Inputs are NaN."""
    for layer in operations(kind):
        layer.step(random_tokens(layer.shape, 3, 3), range(3))
        layer.poison()
        layer.poisoned = False
        tokens = random_tokens(layer.shape, 4, 3).map(lambda t: torch.full_like(t, NAN))
        before = [layer.everything(s) for s in range(3)]
        out = layer.step(tokens, [-1, -1, -1, -1], [3, 0, 1, 2], [3, 3, 3, 3])
        assert (out == 0).all()
        with pytest.raises(ContractError, match="padding"):
            layer.step(tokens, [-1, -2, -1, -1], [3, 3, 3, 3])
        assert all(same(layer.everything(s), kept) for s, kept in zip(range(3), before, strict=True))
        live = random_tokens(layer.shape, 1, 3, seed=4)
        assert (layer.step(live, [0]) != 0).any() and not same(layer.everything(0), before[0])


def test_c04_c05_the_convolution_skips_padding_rows_and_outputs_zero_for_the_layer_behind_it() -> None:
    """C05: what the convolution leaves in a padded row is what the recurrence would read."""
    window = torch.full((3, 6, 5), NAN)
    cursors = CursorTensors.allocate(3, CPU)
    x = torch.full((3, 2, 5), NAN)
    x[1] = 1.0
    rows = step_rows("test", torch.tensor([-1, 0, -1]), torch.tensor([2, 1, 0]), 3, 2)
    out = conv1d_update(window, cursors, rows, x, torch.ones(5, 1, 4), torch.ones(5))
    assert (out[0] == 0).all() and (out[2] == 0).all() and (out[1, 1] == 0).all() and (out[1, 0] != 0).all()
    assert window.isnan().sum() == window.numel() - 5


def run(session: TorchSession, ids: list[int]) -> list[np.ndarray]:
    """Two sequences, chunks, verify steps with rejection, padding, reuse of a slot."""
    found = []
    first, logits = start(session, ids[:18], seed=5)
    found.append(logits)
    second = session.allocate(6)
    session.prefill([PrefillChunk(second, ids[:3], False)])
    for step in range(6):
        rows = [DecodeRow(first, ids[18 + step : 22 + step]), DecodeRow(-1, [7, 8])]
        found += session.decode(rows)[:1]
        session.commit([1, 2])
    logits_or_none = session.prefill([PrefillChunk(second, ids[3:8], True)])[0]
    assert logits_or_none is not None
    found.append(logits_or_none)
    found.append(session.decode([DecodeRow(second, []), DecodeRow(first, ids[24:26])])[1])
    session.commit([0, 2])
    session.free(second)
    third, logits = start(session, ids[5:12], seed=7)
    assert third == second
    return [*found, logits, force(session, third, ids[12:16])]


@pytest.mark.parametrize("name", ["nemotron-dense", "nemotron-moe", "qwen-moe"])
@pytest.mark.parametrize(
    "pool,conventional",
    [(POOLS[0], False), (POOLS[1], False), (POOLS[0], True)],
    ids=["float32", "two", "conventional"],
)
def test_whole_models_give_the_same_bits_with_everything_dead_poisoned(
    name: str, pool: dict[str, Any], conventional: bool
) -> None:
    """Free slots and registers, dead records, taps, snapshots and KV, and the rows of padded tokens."""
    poisoned = open_session(name, window=5, conventional=conventional, **pool)
    plain = open_session(name, window=5, conventional=conventional, **pool)
    plain = TorchSession(plain._weights, plain.pools)  # without debug
    for got, want in zip(run(poisoned, sequence(name)), run(plain, sequence(name)), strict=True):
        assert np.array_equal(got, want) and np.isfinite(got).all()


@pytest.mark.parametrize("name", ["nemotron-moe", "qwen-moe"])
def test_every_foreign_hash_stays_the_same_around_every_kind_of_step(name: str) -> None:
    session, ids = open_session(name, slots=5), sequence(name)
    slots = [start(session, ids[: 5 + i], seed=i)[0] for i in range(4)]

    def unchanged(active: list[int]) -> Iterator[None]:
        poison_dead_memory(session.pools)
        before = hashes(session)
        yield
        after = hashes(session)
        for slot in range(5):
            assert (before[slot] == after[slot]) == (slot not in active)

    for active, call in (
        ([slots[1]], lambda: (session.decode([DecodeRow(slots[1], ids[6:9])]), session.commit([1]))),
        ([slots[2]], lambda: (session.decode([DecodeRow(-1, [1]), DecodeRow(slots[2], [4])]), session.commit([1, 1]))),
        ([slots[0]], lambda: session.prefill([PrefillChunk(slots[0], ids[5:20], False)])),
        ([slots[0]], lambda: session.prefill([PrefillChunk(slots[0], ids[20:22], True)])),
        ([4], lambda: session.fork(slots[3], 8)),
    ):
        check = unchanged(active)
        next(check)
        call()
        assert next(check, None) is None
