"""Replay equals the conventional recurrence: any window, any split, both families, exact and as stored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.spec.helpers import (
    KINDS,
    Sequence,
    assert_records_equal,
    conventional,
    even_split,
    joined,
    part,
    random_inputs,
    small_shape,
)
from trtllm_replayssm.config import MAX_STEP_TOKENS, ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.replay import ReplayLayer, StepInputs, replay, round_correction
from trtllm_replayssm.spec.ssm import l2_norm_factor, to_heads

WINDOWS = [1, 2, 3, 8, 16, 32]


def step_sizes(window: int) -> range:
    return range(1, min(window, MAX_STEP_TOKENS) + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_outputs_and_states_equal_the_recurrence_for_every_step_size(kind: SsmKind, window: int) -> None:
    shape = small_shape(kind)
    tokens = 2 * window + 5
    inputs = random_inputs(shape, tokens)
    want, states = conventional(shape, inputs)
    for size in step_sizes(window):
        sequence = Sequence.new(shape, ReplayConfig(window=window, max_step_tokens=size), exact=True)
        out = sequence.run(inputs, even_split(tokens, size))
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(sequence.state(), states[tokens], rtol=1e-12, atol=1e-12)
        absorbed = tokens - sequence.cursors.h
        np.testing.assert_allclose(sequence.layer.checkpoint, states[absorbed], rtol=1e-12, atol=1e-12)
        assert sequence.cursors.position == tokens


@pytest.mark.parametrize("kind", KINDS)
def test_every_checkpoint_written_equals_the_recurrence(kind: SsmKind) -> None:
    shape = small_shape(kind)
    inputs = random_inputs(shape, 60)
    _, states = conventional(shape, inputs)
    sequence = Sequence.new(shape, ReplayConfig(window=6, max_step_tokens=3), exact=True)
    written: list[int] = []
    write = ReplayLayer.write_checkpoint

    def spy(layer: ReplayLayer, state: np.ndarray, cursors: object, position: int) -> None:
        np.testing.assert_allclose(state, states[position], rtol=1e-12, atol=1e-12)
        written.append(position)
        write(layer, state, cursors, position)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayLayer, "write_checkpoint", spy)
        sequence.run(inputs, [1, 2, 3] * 10)
    assert written == sorted(set(written)) and len(written) >= 9


@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize("committed", [0, 1, 3])
def test_draft_corrections_solve_the_triangular_system(window: int, committed: int) -> None:
    """Eq. 10: U (I + A B) = R B, written out with a linear solver."""
    shape = small_shape(SsmKind.GDN)
    tokens, drafts = 7 + committed, 3
    sequence = Sequence.new(shape, ReplayConfig(window=window, max_step_tokens=drafts), exact=True)
    sequence.layer.checkpoint = np.random.default_rng(1).normal(size=sequence.layer.checkpoint.shape)
    inputs = random_inputs(shape, tokens)
    assert inputs.beta is not None
    for t in range(committed):
        sequence.step(part(inputs, t, t + 1))
    checkpoint, kept = sequence.layer.checkpoint.copy(), sequence.committed()
    step = part(inputs, committed, committed + drafts)
    sequence.step(step)
    first = sequence.cursors.h - drafts
    got = np.array([r.value for r in sequence.committed()[first:]])
    keys = to_heads(shape, np.array([r.key for r in kept] + list(step.k)))
    keys = keys * l2_norm_factor(keys)[..., None]
    decay = np.array([r.log_decay for r in kept] + list(step.log_decay))
    assert step.beta is not None
    for h in range(shape.heads):
        k_c, k_d = keys[:committed, h].T, keys[committed:, h].T
        prefix = np.cumsum(decay[:, h])  # prefix sums are harmless for these decays
        gamma = np.exp(prefix[None, :] - prefix[:, None])  # [j, t] = alpha_{j+1} ... alpha_t
        big_d = np.diag(np.exp(prefix[committed:]))
        a = np.triu(gamma[committed:, committed:] * (k_d.T @ k_d), 1)
        b = np.diag(step.beta[:, h])
        u_c = np.array([r.value[h] for r in kept]).reshape(committed, shape.head_dim).T
        r = step.value[:, h].T - checkpoint[h] @ k_d @ big_d - u_c @ (gamma[:committed, committed:] * (k_c.T @ k_d))
        u_d = np.linalg.solve((np.eye(drafts) + a @ b).T, (r @ b).T).T
        np.testing.assert_allclose(got[:, h].T, u_d, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "split", [[1] * 6, [2, 4], [4, 2], [1, 2, 3], [3, 3], [5, 1]], ids=lambda s: "+".join(map(str, s))
)
def test_any_split_of_a_step_gives_the_same_records_bit_for_bit(kind: SsmKind, split: list[int]) -> None:
    """Corrections are rounded to float16 before any use, so a draft sees what a later step would."""
    shape = small_shape(kind)
    inputs = random_inputs(shape, 6)
    config = ReplayConfig(window=8, max_step_tokens=6)
    whole, parts = Sequence.new(shape, config), Sequence.new(shape, config)
    expected = whole.run(inputs, [6])
    assert np.array_equal(parts.run(inputs, split), expected)
    assert_records_equal(parts.committed(), whole.committed())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("appended", [1, 3, 4])
def test_appending_k_and_keeping_a_is_appending_a(kind: SsmKind, appended: int) -> None:
    shape = small_shape(kind)
    inputs, other = random_inputs(shape, 12), random_inputs(shape, 12, seed=9)
    for kept in range(appended + 1):
        config = ReplayConfig(window=5, max_step_tokens=4)
        rolled, plain = Sequence.new(shape, config), Sequence.new(shape, config)
        for sequence in (rolled, plain):
            sequence.run(part(inputs, 0, 4), [2, 2])
        before = part(inputs, 4, 4 + kept)
        rolled.step(joined(before, part(other, 0, appended - kept)), accepted=kept)
        # the same step with other drafts behind the kept ones, so that both flush alike
        plain.step(joined(before, part(other, 6, 6 + appended - kept)), accepted=kept)
        assert (rolled.cursors, rolled.cursors.position) == (plain.cursors, 4 + kept)
        assert_records_equal(rolled.committed(), plain.committed())
        rest = part(inputs, 4 + kept, 12)
        split = even_split(8 - kept, 3)
        assert np.array_equal(rolled.run(rest, split), plain.run(rest, split))
        assert np.array_equal(rolled.layer.checkpoint, plain.layer.checkpoint)
        exact = Sequence.new(shape, config, exact=True)
        exact.run(part(inputs, 0, 4), [2, 2])
        exact.step(joined(before, part(other, 0, appended - kept)), accepted=kept)
        want, states = conventional(shape, inputs)
        np.testing.assert_allclose(exact.run(rest, split), want[4 + kept :], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(exact.state(), states[-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_one_writes_the_plain_recurrence_at_every_step(kind: SsmKind) -> None:
    shape = small_shape(kind)
    inputs = random_inputs(shape, 9)
    want, states = conventional(shape, inputs)
    sequence = Sequence.new(shape, ReplayConfig(window=1), exact=True)
    for t in range(9):
        out = sequence.step(part(inputs, t, t + 1))
        np.testing.assert_allclose(out[0], want[t], rtol=1e-13, atol=1e-13)
        np.testing.assert_allclose(sequence.layer.checkpoint, states[t], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_pools_stay_within_their_rounding_over_a_long_run(kind: SsmKind) -> None:
    """Error per flush: half a float32 step of the state; GDN adds half a float16 step of each correction."""
    shape = small_shape(kind)
    inputs = random_inputs(shape, 800, slowest=0.002)
    want, states = conventional(shape, inputs)
    sequence = Sequence.new(shape, ReplayConfig(window=16, max_step_tokens=4))
    out = sequence.run(inputs, [4] * 200)
    limit = 2e-7 if kind is SsmKind.MAMBA2 else 2.0**-11
    assert np.abs(out - want).max() < 4 * limit * np.abs(want).max()
    assert np.abs(sequence.state() - states[-1]).max() < 4 * limit * np.abs(states[-1]).max()
    assert not np.array_equal(sequence.state(), states[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_decay", [-np.inf, np.log(1e-12), -700.0])
def test_vanishing_decay_stays_finite_and_equals_the_recurrence(kind: SsmKind, log_decay: float) -> None:
    shape = small_shape(kind)
    inputs = random_inputs(shape, 20)
    decay = inputs.log_decay.copy()
    decay[3:7, 0] = log_decay
    decay[7:16, 1] = log_decay
    decay[12, :] = log_decay
    inputs = replace(inputs, log_decay=decay)
    want, states = conventional(shape, inputs)
    for split in ([1] * 20, [4] * 5, [3, 1] * 5):
        sequence = Sequence.new(shape, ReplayConfig(window=8, max_step_tokens=4), exact=True)
        out = sequence.run(inputs, split)
        assert np.isfinite(out).all() and np.isfinite(sequence.state()).all()
        np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(sequence.state(), states[-1], rtol=1e-12, atol=1e-12)
    stored = Sequence.new(shape, ReplayConfig(window=8, max_step_tokens=4))
    assert np.isfinite(stored.run(inputs, [4] * 5)).all()


def test_replay_of_no_records_is_the_checkpoint() -> None:
    shape = small_shape(SsmKind.MAMBA2)
    state = np.random.default_rng(0).normal(size=(4, 3, 5))
    assert np.array_equal(replay(shape, state, []), state)


def test_corrections_saturate_at_the_largest_float16() -> None:
    assert list(round_correction(np.array([1e6, -1e6, 1.0 + 2.0**-12]))) == [65504.0, -65504.0, 1.0]
    shape = small_shape(SsmKind.GDN)
    inputs = random_inputs(shape, 3)
    inputs.value[1] *= 1e7
    sequence = Sequence.new(shape, ReplayConfig(window=4, max_step_tokens=3))
    out = sequence.step(inputs)
    assert np.isfinite(out).all()
    assert np.abs(sequence.committed()[1].value).max() == 65504.0
    again = Sequence.new(shape, ReplayConfig(window=4, max_step_tokens=3))
    assert np.array_equal(again.run(inputs, [2, 1]), out)


def test_records_keep_raw_inputs_only_where_a_flush_re_derives() -> None:
    shape = small_shape(SsmKind.GDN)
    inputs = random_inputs(shape, 2)
    for recurrence, read, keeps in (
        (StateFormat.FLOAT32, None, False),
        (StateFormat.FLOAT16, None, True),
        (StateFormat.FLOAT32, StateFormat.FP8, True),
    ):
        config = ReplayConfig(window=4, recurrence=recurrence, read=read, recurrence_rounding=Rounding.NEAREST)
        sequence = Sequence.new(shape, config)
        sequence.run(inputs, [1, 1])
        assert [r.v is not None and r.beta is not None for r in sequence.committed()] == [keeps, keeps]


def test_stored_scalars_are_float32() -> None:
    for kind in KINDS:
        shape = small_shape(kind)
        inputs = random_inputs(shape, 1)
        names = ["dt"] if kind is SsmKind.MAMBA2 else ["beta", "log_decay"]
        for name in names:
            setattr(inputs, name, getattr(inputs, name) * (1 + 1e-9))
        config = ReplayConfig(window=4, recurrence=StateFormat.FP8)
        sequence = Sequence.new(shape, config)
        sequence.run(inputs, [1])
        record = sequence.committed()[0]
        for stored in [record.weight] if kind is SsmKind.MAMBA2 else [record.beta, record.log_decay, record.key_factor]:
            assert stored is not None and np.array_equal(stored, stored.astype(np.float32))


def test_a_step_longer_than_the_pool_allows_is_refused_and_an_empty_one_is_not() -> None:
    shape = small_shape(SsmKind.GDN)
    sequence = Sequence.new(shape, ReplayConfig(window=4, max_step_tokens=2))
    with pytest.raises(ContractError, match="T_max = 2"):
        sequence.step(random_inputs(shape, 3))
    empty = part(random_inputs(shape, 1), 0, 0)
    assert sequence.step(empty).shape == (0, 4, 3)
    assert isinstance(empty, StepInputs) and sequence.cursors.position == 0
