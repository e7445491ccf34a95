"""Two checkpoint precisions: the low-precision copy never reaches the recurrence; rounding is keyed by the request."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.spec.helpers import (
    KINDS,
    LAYER,
    SEED,
    Sequence,
    conventional,
    even_split,
    part,
    random_inputs,
    small_shape,
)
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec.formats import encode
from trtllm_replayssm.spec.philox import state_words
from trtllm_replayssm.spec.replay import Record, ReplayLayer, replay

READS = list(StateFormat)
RECURRENCES = [StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8]


def shape_of(kind: SsmKind) -> SsmShape:
    return small_shape(kind, state_dim=32)


def config_of(recurrence: StateFormat, read: StateFormat | None, **changes: object) -> ReplayConfig:
    settings = {"window": 6, "max_step_tokens": 3, "recurrence": recurrence, "read": read} | changes
    return ReplayConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "recurrence"), list(product(KINDS, RECURRENCES)))
def test_the_recurrence_checkpoint_does_not_depend_on_the_read_format(kind: SsmKind, recurrence: StateFormat) -> None:
    """Bit for bit after every step, for each read format; the outputs of non-flush steps do depend on it."""
    shape, tokens = shape_of(kind), 60
    inputs = random_inputs(shape, tokens)
    outputs, checkpoints = [], []
    for read in READS:
        sequence = Sequence.new(shape, config_of(recurrence, read))
        out, kept = [], []
        for start in range(0, tokens, 3):
            out.append(sequence.step(part(inputs, start, start + 3), accepted=3))
            kept.append(sequence.layer.checkpoint.copy())
        outputs.append(np.concatenate(out))
        checkpoints.append(np.array(kept))
    for other in checkpoints[1:]:
        assert np.array_equal(other, checkpoints[0])
    assert checkpoints[0][-1].any()
    for other in outputs[1:]:
        assert not np.array_equal(other, outputs[0])


@pytest.mark.parametrize("kind", KINDS)
def test_both_copies_are_rounded_from_the_same_float32_state(kind: SsmKind) -> None:
    shape = shape_of(kind)
    sequence = Sequence.new(shape, config_of(StateFormat.FP8, StateFormat.NVFP4))
    inputs = random_inputs(shape, 9)
    sequence.run(part(inputs, 0, 6), [3, 3])
    folded = sequence.state()
    sequence.run(part(inputs, 6, 9), [3])
    layer = sequence.layer
    words = state_words(SEED, LAYER, shape.heads, shape.head_dim * shape.state_dim, 6)
    assert layer.stored is not None and layer.stored_read is not None
    assert np.array_equal(layer.stored.decode(), encode(folded, StateFormat.FP8, Rounding.STOCHASTIC, words).decode())
    assert np.array_equal(layer.stored_read.decode(), encode(folded, StateFormat.NVFP4).decode())


@pytest.mark.parametrize("kind", KINDS)
def test_a_flush_step_reads_the_high_precision_copy_and_the_others_the_low_one(kind: SsmKind) -> None:
    shape = shape_of(kind)
    inputs = random_inputs(shape, 15)
    sequence = Sequence.new(shape, config_of(StateFormat.FLOAT32, StateFormat.NVFP4))
    reference = Sequence.new(shape, config_of(StateFormat.FLOAT32, StateFormat.FLOAT32))
    for sequence_step in range(5):
        step = part(inputs, 3 * sequence_step, 3 * sequence_step + 3)
        flush = sequence.cursors.h == 6
        same = np.array_equal(sequence.step(step), reference.step(step))
        no_flush_yet = sequence_step < 2
        assert same == (flush or no_flush_yet)


def test_re_derivation_removes_the_low_precision_error_that_folding_cached_corrections_keeps() -> None:
    """NVFP4 reads over a float32 recurrence: with Alg. 6 the state is exact, without it has the copy's error."""
    shape, tokens = shape_of(SsmKind.GDN), 240
    inputs = random_inputs(shape, tokens, slowest=0.001)
    _, states = conventional(shape, inputs)
    errors = {}
    for rederive in (True, False):
        sequence = Sequence.new(shape, config_of(StateFormat.FLOAT32, StateFormat.NVFP4))
        with pytest.MonkeyPatch.context() as patch:
            if not rederive:
                patch.setattr(ReplayLayer, "_rederive", lambda self, source, committed: committed)
            sequence.run(inputs, even_split(tokens, 3))
            want = states[tokens - sequence.cursors.h]
            errors[rederive] = np.abs(sequence.layer.checkpoint - want).max() / np.abs(want).max()
    assert errors[True] < 1e-6
    assert errors[False] > 1e-3


def test_re_derived_corrections_are_not_rounded_to_the_rings_float16() -> None:
    shape = shape_of(SsmKind.GDN)
    inputs = random_inputs(shape, 6)
    _, states = conventional(shape, inputs)
    derived = Sequence.new(shape, config_of(StateFormat.FLOAT32, StateFormat.FLOAT32))
    cached = Sequence.new(shape, config_of(StateFormat.FLOAT32, None))
    for sequence in (derived, cached):
        sequence.run(inputs, [3, 3])
    assert np.abs(derived.state() - states[-1]).max() < 1e-6
    assert np.abs(cached.state() - states[-1]).max() > 1e-5


def test_the_flush_steps_own_outputs_and_drafts_use_the_re_derived_corrections() -> None:
    shape = shape_of(SsmKind.GDN)
    inputs = random_inputs(shape, 9)
    sequence = Sequence.new(shape, config_of(StateFormat.FLOAT32, StateFormat.NVFP4))
    sequence.run(part(inputs, 0, 6), [3, 3])
    for record in sequence.committed():
        record.value = record.value * np.nan  # the cached corrections may not be read by this step
    out = sequence.step(part(inputs, 6, 9))
    want, _ = conventional(shape, inputs)
    assert np.abs(out - want[6:]).max() < 2.0**-9 * np.abs(want).max()
    assert all(np.isfinite(r.value).all() for r in sequence.committed())


def test_a_shared_low_precision_checkpoint_re_derives_and_a_float32_one_folds_the_cached_corrections() -> None:
    shape = shape_of(SsmKind.GDN)
    inputs = random_inputs(shape, 6)
    for recurrence, rederives in ((StateFormat.FP8, True), (StateFormat.FLOAT16, True), (StateFormat.FLOAT32, False)):
        sequence = Sequence.new(shape, config_of(recurrence, None))
        sequence.run(inputs, [3, 3])
        before = sequence.state()
        for record in sequence.committed():
            record.value = record.value + 1.0
        assert np.array_equal(sequence.state(), before) == rederives


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_error_does_not_grow_with_length_when_the_copies_are_separate(kind: SsmKind) -> None:
    """Heads that hardly forget: a shared FP8 state drifts over flushes, the separate one's read error stays."""
    shape, tokens = shape_of(kind), 960
    inputs = random_inputs(shape, tokens, slowest=1e-4)
    inputs.log_decay[:] = -1e-4
    want, _ = conventional(shape, inputs)
    errors = {}
    for name, config in {
        "shared": config_of(StateFormat.FP8, None, recurrence_rounding=Rounding.NEAREST),
        "separate": config_of(StateFormat.FLOAT32, StateFormat.FP8),
    }.items():
        out = Sequence.new(shape, config).run(inputs, even_split(tokens, 3))
        scale = np.abs(want).max(axis=(1, 2))
        relative = np.abs(out - want).max(axis=(1, 2)) / scale
        errors[name] = relative[60:180].mean(), relative[-120:].mean()
    assert errors["separate"][1] < 2.0 * errors["separate"][0]
    assert errors["shared"][1] > 2.0 * errors["separate"][1]


def flushed(kind: SsmKind, *, seed: int = SEED, layer: int = LAYER, tokens: int = 12, origin: int = 0) -> np.ndarray:
    """The FP8 checkpoint (codes) after some flushes of one request."""
    shape = shape_of(kind)
    sequence = Sequence.new(shape, config_of(StateFormat.FP8, None), seed=seed)
    sequence.layer.layer = layer
    sequence.cursors.origin = origin
    sequence.run(random_inputs(shape, tokens), [3] * (tokens // 3))
    assert sequence.layer.stored is not None
    return sequence.layer.stored.values


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_depends_on_request_and_layer_and_not_on_the_place_in_memory(kind: SsmKind) -> None:
    base = flushed(kind)
    assert np.array_equal(base, flushed(kind))
    assert np.array_equal(base, flushed(kind, origin=5))
    assert not np.array_equal(base, flushed(kind, seed=SEED + 1))
    assert not np.array_equal(base, flushed(kind, layer=LAYER + 1))


def test_equal_states_of_two_heads_and_of_two_flushes_round_differently() -> None:
    shape = small_shape(SsmKind.MAMBA2, heads=2, groups=1, head_dim=8, state_dim=32)
    layer = ReplayLayer(shape, config_of(StateFormat.FP8, None), LAYER)
    state = np.tile(np.random.default_rng(0).normal(size=(1, 8, 32)), (2, 1, 1))
    sequence = Sequence.new(shape, layer.config)
    values = []
    for position in (6, 12):
        sequence.layer.write_checkpoint(state, sequence.cursors, position)
        assert sequence.layer.stored is not None
        values.append(sequence.layer.stored.values)
        assert not np.array_equal(values[-1][0], values[-1][1])
    assert not np.array_equal(values[0], values[1])


def test_a_new_tenant_of_a_slot_draws_its_own_bits() -> None:
    """Two requests, one after the other in the same place with equal inputs: other seeds, other rounding."""
    first, second = flushed(SsmKind.GDN, seed=1), flushed(SsmKind.GDN, seed=2**40 + 1)
    assert not np.array_equal(first, second)


def test_replay_is_linear_in_its_records() -> None:
    """The fold of two record lists one after the other is the fold of their concatenation."""
    shape = shape_of(SsmKind.MAMBA2)
    inputs = random_inputs(shape, 7)
    assert inputs.dt is not None
    records = [
        Record(inputs.k[t], np.ones(2), inputs.log_decay[t], inputs.value[t], weight=inputs.dt[t]) for t in range(7)
    ]
    state = np.random.default_rng(0).normal(size=(4, 3, 32))
    twice = replay(shape, replay(shape, state, records[:3]), records[3:])
    np.testing.assert_allclose(replay(shape, state, records), twice, rtol=1e-12, atol=1e-12)
