"""The boundary grid on the torch reference: window, step size, committed records, acceptance, next step.

All (h, a) of one (L, T) are rows of one batch, so every step mixes rows that flush with rows that do not. Dead ring
records and convolution rows are NaN before each step. Compared after every step with the conventional operations:
outputs, states with all records applied, convolution outputs and taps, cursors; and the stored checkpoint after a
forced flush. Two parked slots keep their bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import KINDS, NAN, Layer, Tokens, random_tokens, same
from tests.tolerance import CORRECTION_NOISE, FLOAT32_STEP, RECURRENCE_NOISE
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.ops.reference.conv1d import conv1d_update
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.conv1d import conv_prefill
from trtllm_replayssm.spec.cursors import Cursors, commit

CASES = [(window, width) for window in (1, 2, 3, 8, 16) for width in sorted({1, 2, 4, 6, window}) if width <= window]
NEXT = ["plain", "speculative", "finish", "resumed", "padded"]
CHANNELS, KERNEL = 3, 4
WEIGHT = torch.linspace(-1, 1, CHANNELS * KERNEL).reshape(CHANNELS, 1, KERNEL)


class Grid:
    """One row per (h, a), in slots 0.. of a pool with as many spare slots and two parked ones."""

    def __init__(self, kind: SsmKind, window: int, width: int, read: StateFormat | None) -> None:
        self.width, self.window = width, window
        hs = sorted({h for h in (0, 1, window - width - 1, window - width, window - width + 1, window - 1, window)
                     if 0 <= h <= window})  # fmt: skip
        self.cells = [(h, a) for h in hs for a in sorted({0, 1, width - 1, width})]
        self.rows = len(self.cells)
        self.slots = list(range(self.rows))
        config = ReplayConfig(window=window, max_step_tokens=width, read=read)
        shape = ssm_shape(kind, heads=2, groups=1, head_dim=3, state_dim=8)
        self.layer = Layer(shape, config, 2 * self.rows + 2)
        self.plain = Layer(shape, config, 2 * self.rows + 2, conventional=True)
        self.noise = RECURRENCE_NOISE if kind is SsmKind.MAMBA2 else CORRECTION_NOISE
        self.convolution = torch.full((2 * self.rows + 2, config.conv_rows(KERNEL), CHANNELS), NAN)
        self.history: list[torch.Tensor] = [torch.zeros(0, CHANNELS) for _ in range(self.rows)]
        self.cursors = [Cursors() for _ in range(self.rows)]
        self.seed = 100 * window + width
        self.reached = False
        self.layer.poison()
        self.parked = [self.layer.everything(s) for s in (-2, -1)]

    def tokens(self) -> Tokens:
        self.seed += 1
        return random_tokens(self.layer.shape, self.rows, self.width, seed=self.seed, slowest=0.05)

    def step(self, counts: Sequence[int], accepted: Sequence[int]) -> None:
        """One step of every row: outputs, convolution and cursors compared; states too once the cells are reached."""
        tokens = self.tokens()
        slots = [s if n > 0 else -1 for s, n in zip(self.slots, counts, strict=True)]
        self.convolve(counts, accepted)
        out = self.layer.step(tokens, slots, counts, accepted)
        want = self.plain.step(tokens, slots, counts, accepted)
        assert float((out - want).abs().max()) <= self.noise * max(float(want.abs().max()), 1.0)
        for row, slot in enumerate(self.slots):
            commit(self.layer.config, self.cursors[row], counts[row], accepted[row])
            mine = self.cursors[row]
            assert self.layer.cursor(slot) == (mine.origin, mine.h, mine.position)
            assert self.plain.cursor(slot)[2] == mine.position == len(self.history[row])
            if not self.reached:
                continue
            state, truth = self.layer.fold(slot), self.plain.fold(slot)
            assert float((state - truth).abs().max()) <= self.noise * max(float(truth.abs().max()), 1.0)
        assert all(same(self.layer.everything(s), kept) for s, kept in zip((-2, -1), self.parked, strict=True))

    def convolve(self, counts: Sequence[int], accepted: Sequence[int]) -> None:
        """The convolution of the step over its rolling window, before the cursors move."""
        positions, ring_rows = self.layer.cursors.position, self.convolution.shape[1]
        for slot in self.slots:
            live = {p % ring_rows for p in range(max(int(positions[slot]) - KERNEL + 1, 0), int(positions[slot]))}
            self.convolution[slot, [r for r in range(ring_rows) if r not in live]] = NAN
        x = torch.randn(self.rows, self.width, CHANNELS, generator=torch.Generator().manual_seed(self.seed))
        slots = [s if n > 0 else -1 for s, n in zip(self.slots, counts, strict=True)]
        rows = self.layer.rows(slots, counts, self.width)
        out = conv1d_update(self.convolution, self.layer.cursors, rows, x, WEIGHT, None)
        for row, (count, taken) in enumerate(zip(counts, accepted, strict=True)):
            past = self.history[row]
            inputs = torch.cat([past, x[row, :count]])
            recent = torch.cat([past[len(past) - KERNEL + 1 :] if len(past) >= KERNEL else past, x[row, :count]])
            clean = np.zeros((KERNEL, CHANNELS))
            assert (out[row, count:] == 0).all()
            if count == 0:
                continue
            want = conv_prefill(clean, 0, recent.double().numpy(), WEIGHT.double().numpy(), None)[-count:]
            assert np.abs(out[row, :count].numpy() - want).max() <= 20 * FLOAT32_STEP
            self.history[row] = inputs[: len(past) + taken]

    def reach(self) -> None:
        """A used checkpoint, an origin that is not 0, rejected records behind the cursor, and h of each cell."""
        everywhere = [self.width] * self.rows
        for _ in range(self.window // self.width + 1):
            self.step(everywhere, everywhere)
        # T refused tokens force a flush in every row that has more than L - T records; single ones fill the others up
        while any(c.h + self.width <= self.window for c in self.cursors):
            self.single([c.h + self.width <= self.window for c in self.cursors])
        self.step(everywhere, [0] * self.rows)
        for goal in range(self.window):
            self.single([h > goal for h, _ in self.cells])
        assert [c.h for c in self.cursors] == [h for h, _ in self.cells]
        self.reached = True

    def single(self, which: Sequence[bool]) -> None:
        counts = [int(w) for w in which]
        self.step(counts, counts)

    def force_flush(self) -> None:
        """Compare each stored checkpoint with the conventional state that it has absorbed."""
        self.reached = False
        while any(c.h + self.width <= self.window for c in self.cursors):
            self.single([c.h + self.width <= self.window for c in self.cursors])
        absorbed = [self.plain.fold(slot).clone() for slot in self.slots]
        self.step([self.width] * self.rows, [0] * self.rows)
        for slot, truth in zip(self.slots, absorbed, strict=True):
            stored = self.layer.state.checkpoint.load(torch.tensor([slot]))[0]
            assert float((stored - truth).abs().max()) <= self.noise * max(float(truth.abs().max()), 1.0)

    def move(self) -> None:
        """Every row goes on in another slot; its old one is filled with NaN."""
        target = [self.rows + (3 * i + 1) % self.rows if self.rows % 3 else self.rows + i for i in range(self.rows)]
        registers = [*self.layer.cursors.tensors(), *self.plain.cursors.tensors()]
        assert self.plain.conventional is not None
        for tensor in (*registers, *self.layer.state.tensors(), self.plain.conventional.states, self.convolution):
            kept = tensor[self.slots].clone()
            if tensor.is_floating_point():
                tensor[self.slots] = NAN
            tensor[target] = kept
        self.slots = target


def named_situations(grid: Grid) -> None:
    """The corners that the grid is named for are really among its rows."""
    window, width = grid.window, grid.width
    assert (window - width, width) in grid.cells, "h + T exactly L"
    assert (window, 1) in grid.cells, "flush and all drafts rejected in one step"
    if window - width + 1 <= window:
        assert (window - width + 1, width) in grid.cells, "h + T = L + 1"


@cache
def reached(kind: SsmKind, window: int, width: int) -> Grid:
    """GDN in half of the cases with folded corrections, in the others re-deriving them beside a float32 read copy."""
    read = StateFormat.FLOAT32 if kind is SsmKind.GDN and (window + width) % 2 else None
    grid = Grid(kind, window, width, read)
    named_situations(grid)
    grid.reach()
    return grid


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window,width", CASES)
@pytest.mark.parametrize("following", NEXT)
def test_every_corner_of_the_grid_equals_the_recurrence(kind: SsmKind, window: int, width: int, following: str) -> None:
    grid = copy.deepcopy(reached(kind, window, width))
    grid.step([width] * grid.rows, [a for _, a in grid.cells])
    if following == "plain":
        grid.step([1] * grid.rows, [1] * grid.rows)
    elif following == "speculative":
        grid.step([width] * grid.rows, [min(a + 1, width) for _, a in grid.cells])
    elif following == "resumed":
        grid.move()
        grid.step([width] * grid.rows, [1] * grid.rows)
    elif following == "padded":
        before = [grid.layer.everything(s) for s in grid.slots]
        grid.layer.poisoned = False
        grid.step([0] * grid.rows, [0] * grid.rows)
        assert all(same(grid.layer.everything(s), kept) for s, kept in zip(grid.slots, before, strict=True))
        grid.layer.poisoned = True
    grid.force_flush()


@pytest.mark.parametrize("window", [1, 2, 3, 8, 15])
def test_a23_more_step_tokens_than_the_window_are_refused_when_the_pool_is_made(window: int) -> None:
    """A23, A05: L + 1; the message shows the inequality."""
    with pytest.raises(ConfigError, match=f"T_max = {window + 1} > L = {window}"):
        ReplayConfig(window=window, max_step_tokens=window + 1)
