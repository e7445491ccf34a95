"""The boundary grid: every corner of window, step size, committed records, acceptance and next step, on the spec.

One layer with its convolution in front of it; dead ring rows and convolution rows are poisoned with NaN before each
step. Compared with the conventional recurrence: outputs of all tokens, the state after a forced flush, the
convolution's outputs, the cursors.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.spec.helpers import KINDS, Sequence, conventional, joined, part, random_inputs, small_shape
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec.conv1d import conv_step
from trtllm_replayssm.spec.cursors import Cursors
from trtllm_replayssm.spec.replay import Record, StepInputs

CASES = [(window, step) for window in (1, 2, 3, 8, 16) for step in sorted({1, 2, 4, 6, window}) if step <= window]
NEXT_STEPS = ["plain", "speculative", "finish", "resumed", "padded"]


@dataclass
class Run:
    """A sequence under test, the tokens it has committed so far, and the source of further ones."""

    sequence: Sequence
    window: np.ndarray
    history: StepInputs
    supply: StepInputs
    used: int = 0

    @property
    def shape(self) -> SsmShape:
        return self.sequence.layer.shape

    def poison(self) -> None:
        """NaN in every ring row that holds no committed record and every convolution row no tap may read."""
        layer, cursors = self.sequence.layer, self.sequence.cursors
        live = {cursors.row(layer.config, j) for j in range(cursors.h)}
        nan_key = np.full((self.shape.groups, self.shape.state_dim), np.nan)
        nan_head = np.full(self.shape.heads, np.nan)
        nan_value = np.full((self.shape.heads, self.shape.head_dim), np.nan)
        dead = Record(nan_key, nan_key[:, 0], nan_head, nan_value, nan_head, nan_value, nan_head)
        layer.ring = [record if row in live else dead for row, record in enumerate(layer.ring)]
        rows = len(self.window)
        taps = {(cursors.position - 1 - j) % rows for j in range(min(self.shape.conv_kernel - 1, cursors.position))}
        for row in set(range(rows)) - taps:
            self.window[row] = np.nan

    def step(self, tokens: int, accepted: int) -> None:
        """One step of fresh tokens; checks its outputs, cursors and the state after it."""
        self.poison()
        inputs = part(self.supply, self.used, self.used + tokens)
        self.used += tokens
        before = replace(self.sequence.cursors)
        whole = joined(self.history, inputs)
        want, states = conventional(self.shape, whole)
        committed = len(self.history.k)
        out = self.sequence.step(inputs, accepted)
        np.testing.assert_allclose(out, want[committed:], rtol=1e-11, atol=1e-11)
        channels = whole.k[:, 0]
        got = conv_step(self.window, before.position, channels[committed:], CONV_WEIGHT, None)
        clean = np.zeros((len(channels) + 3, channels.shape[1]))
        np.testing.assert_allclose(got, conv_step(clean, 0, channels, CONV_WEIGHT, None)[committed:], rtol=1e-12)
        self.check_cursors(before, tokens, accepted)
        self.history = part(whole, 0, committed + accepted)
        np.testing.assert_allclose(self.sequence.state(), states[committed + accepted], rtol=1e-11, atol=1e-11)

    def check_cursors(self, before: Cursors, tokens: int, accepted: int) -> None:
        config, now = self.sequence.layer.config, self.sequence.cursors
        flushed = before.h + tokens > config.window
        assert now.h == (0 if flushed else before.h) + accepted
        drop = before.h if flushed else 0
        assert now.origin == (before.origin + drop) % (config.window + config.max_step_tokens)
        assert now.position == before.position + accepted
        assert 0 <= now.h <= config.window

    def resumed(self) -> Run:
        """Saved, and restored into another slot whose memory was somebody else's."""
        other = Sequence.new(self.shape, self.sequence.layer.config, exact=True)
        other.cursors = replace(self.sequence.cursors)
        other.layer.checkpoint = self.sequence.layer.checkpoint.copy()
        for j in range(other.cursors.h):
            row = other.cursors.row(other.layer.config, j)
            other.layer.ring[row] = self.sequence.layer.ring[row]
        return replace(self, sequence=other, window=self.window.copy())


CONV_WEIGHT = np.random.default_rng(5).normal(size=(3, 1, 4))


def start(kind: SsmKind, window: int, step_tokens: int, committed: int) -> Run:
    """`committed` records waiting, at a ring origin that makes the next step wrap for most cases."""
    shape = small_shape(kind, heads=2, groups=1, head_dim=2, state_dim=3)
    config = ReplayConfig(window=window, max_step_tokens=step_tokens)
    sequence = Sequence.new(shape, config, exact=True)
    sequence.layer.checkpoint[:] = 0.0
    sequence.cursors.origin = (config.ring_rows - committed - 1) % config.ring_rows
    supply = random_inputs(shape, window + 6 * step_tokens + 12, seed=window * 100 + step_tokens)
    run = Run(sequence, np.full((config.conv_rows(4), 3), np.nan), part(supply, 0, 0), supply)
    for _ in range(committed):
        run.step(1, 1)
    assert sequence.cursors.h == committed
    return run


def corner_heights(window: int, step: int) -> list[int]:
    wanted = {0, 1, window - step - 1, window - step, window - step + 1, window - 1, window}
    return sorted(h for h in wanted if 0 <= h <= window)


def next_step(run: Run, name: str, step: int) -> None:
    if name == "plain":
        run.step(1, 1)
        run.step(1, 1)
    elif name == "speculative":
        run.step(step, min(2, step))
        run.step(step, step)
    elif name == "resumed":
        other = run.resumed()
        other.step(step, 1)
        other.step(1, 1)
    elif name == "padded":
        for _ in range(3):
            run.step(0, 0)
        run.step(step, 1)
    else:
        cursors = replace(run.sequence.cursors)
        run.step(step, 0)  # idles after the end of the sequence: nothing may move but a flushed window
        assert run.sequence.cursors.position == cursors.position


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "step"), CASES)
def test_boundaries(kind: SsmKind, window: int, step: int) -> None:
    for committed in corner_heights(window, step):
        base = start(kind, window, step, committed)
        for accepted in sorted({0, 1, step - 1, step}):
            after = copy.deepcopy(base)
            after.step(step, accepted)
            for name in NEXT_STEPS:
                next_step(copy.deepcopy(after), name, step)


@pytest.mark.parametrize("kind", KINDS)
def test_six_tokens_fill_the_window_exactly_without_a_flush_and_one_more_record_flushes(kind: SsmKind) -> None:
    run = start(kind, 8, 6, 2)
    run.step(6, 6)
    assert (run.sequence.cursors.h, run.sequence.layer.checkpoint.any()) == (8, False)
    run = start(kind, 8, 6, 3)
    run.step(6, 1)  # a flush with every draft rejected
    assert (run.sequence.cursors.h, run.sequence.layer.checkpoint.any()) == (1, True)
    run.step(6, 6)
    run.step(1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_hundred_steps_of_changing_acceptance_wrap_the_ring_many_times(kind: SsmKind) -> None:
    run = start(kind, 5, 3, 0)
    run.supply = random_inputs(run.shape, 400, seed=77)
    rng = np.random.default_rng(0)
    for _ in range(100):
        tokens = int(rng.integers(0, 4))
        run.step(tokens, int(rng.integers(0, tokens + 1)))
    assert len(run.history.k) > 50


@pytest.mark.parametrize("accepted", [-1, 5])
def test_an_accepted_count_outside_the_step_is_clamped(accepted: int) -> None:
    run = start(SsmKind.MAMBA2, 8, 4, 2)
    inputs = part(run.supply, run.used, run.used + 4)
    run.sequence.step(inputs, accepted)
    kept = 0 if accepted < 0 else 4
    assert (run.sequence.cursors.h, run.sequence.cursors.position) == (2 + kept, 2 + kept)
