"""The update that skips faded heads: what the update gives on checkpoints whose faded heads are zero, bit for bit, and
not one read of a faded head's checkpoint, which holds NaN here.

Oracle: the update (judged by test_update.py), which the reference's rule (ops/reference/decay_skip.py) hands a zero.
It is launched as the skipping kernels are, whose products, sums and folds are its own code: every bit must agree. By
itself it takes another kernel for few plain rows, which folds record after record in float32 where these sum sixteen on
tensor cores: two right float32 states, not one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.native import harness
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ContractError, UnsupportedError
from trtllm_replayssm.launches import TunedLaunch, UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.ops.native import NativeOps
from trtllm_replayssm.ops.native_library import load_library
from trtllm_replayssm.ops.reference.decay_skip import DecaySkip
from trtllm_replayssm.ops.reference.window import ring_index
from trtllm_replayssm.shapes import SsmKind, SsmShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

SKIP_BELOW = 2.0**-9
SLOTS = 6
WINDOW = 16
FEW = 100  # rows; between the batches here, on both sides of the launch choice


@dataclass
class Layer:
    """A layer's state after `h` committed records a slot, with heads from slow to fast, and its native operations."""

    shape: SsmShape
    state: ReplayLayerState
    cursors: CursorTensors
    native: NativeOps
    a: torch.Tensor

    @staticmethod
    def make(shape: SsmShape, config: ReplayConfig, slots: int, seed: int) -> Layer:
        """Rings filled with random records, dead rows with NaN; each slot at an h and an origin of its own."""
        device, g = torch.device("cuda"), torch.Generator().manual_seed(seed)
        state = ReplayLayerState.allocate(shape, config, 3, slots, torch.bfloat16, device)
        cursors = CursorTensors.allocate(slots, device)
        h = [count * config.window // 16 for count in (0, 9, 16, 14, 16, 3)[:slots]]
        cursors.h.copy_(torch.tensor(h))
        cursors.origin.copy_(torch.tensor([(11 * s) % config.ring_rows for s in range(slots)]))
        cursors.position.copy_(torch.tensor([100 + s for s in range(slots)]))
        state.checkpoint.data.copy_(torch.randn(state.checkpoint.data.shape, generator=g))
        index = ring_index(state, cursors, torch.arange(slots, device=device)).cpu()
        for ring in (state.ring_value, state.ring_key, state.ring_decay):
            filled = torch.full(ring.shape, float("nan"))
            for slot, count in enumerate(h):
                rows = index[slot, :count]
                records = torch.randn((ring.shape[1], count, *ring.shape[3:]), generator=g)
                filled[slot][:, rows] = records.abs() if ring is state.ring_decay else records
            ring.copy_(filled)
        native = NativeOps(load_library(harness.LIBRARY), device)
        assert native.unsupported(state, cursors, torch.bfloat16) is None
        a = -torch.logspace(-2, 2, shape.heads, device=device)  # from heads that never fade to those that do at once
        return Layer(shape, state, cursors, native, a)

    def copy(self, launch: TunedLaunch | None = None) -> Layer:
        """launch: of the update's steps; None: the library's choice."""
        config = replace(self.state.config, launches=() if launch is None else (launch,))
        state = ReplayLayerState.allocate(self.shape, config, 3, len(self.cursors.h), torch.bfloat16, self.a.device)
        for ours, theirs in zip(state.tensors(), self.state.tensors(), strict=True):
            ours.copy_(theirs)
        return Layer(self.shape, state, self.cursors, self.native, self.a)

    def step(self, rows: StepRows, inputs: dict[str, Any], skip_below: float | None) -> torch.Tensor:
        return self.native.mamba2_update(
            self.state, self.cursors, rows, **inputs, a=self.a, d_skip=torch.ones_like(self.a), skip_below=skip_below
        )


def alike(rows: StepRows, tokens: int) -> TunedLaunch:
    """The launch of the update that the skipping update's own is made of: few rows a CTA a head, many streamed."""
    kernel = UpdateKernel.DIRECT if len(rows.slot) < FEW else UpdateKernel.STREAMED
    return TunedLaunch(rows=len(rows.slot), tokens=tokens, launch=UpdateLaunch(kernel=kernel))


def inputs_of(shape: SsmShape, rows: int, tokens: int, seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    sizes = {"x": (shape.heads, shape.head_dim), "k": (shape.groups, 128), "q": (shape.groups, 128)}
    made = {name: torch.randn((rows, tokens, *size), generator=g).bfloat16().cuda() for name, size in sizes.items()}
    return {**made, "dt": torch.rand((rows, tokens, shape.heads), generator=g).cuda()}


def faded_heads(layer: Layer, rows: StepRows, dt: torch.Tensor) -> torch.Tensor:
    """[A, H] bool by the reference's rule; every sum is far enough from the threshold for any order of adding."""
    slot, h = rows.active_slot, layer.cursors.h[rows.active_slot].long()
    flush = h + rows.active_num_tokens > layer.state.config.window
    index = ring_index(layer.state, layer.cursors, slot)
    first = (dt[:, 0] * layer.a)[rows.active]

    def at(threshold: float) -> torch.Tensor:
        return DecaySkip(threshold, first, layer.a).faded(layer.state, slot, index, h, flush)

    found = at(SKIP_BELOW)
    assert torch.equal(at(SKIP_BELOW * math.exp(1e-4)), at(SKIP_BELOW * math.exp(-1e-4))), "take another seed"
    return found


@pytest.mark.parametrize("padding", [0, 150], ids=["direct", "streamed"])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("heads", "groups", "head_dim"), [(8, 2, 64), (8, 2, 80), (48, 4, 80), (32, 1, 64)])
def test_faded_checkpoints_are_not_read_and_the_rest_has_the_updates_bits(
    heads: int, groups: int, head_dim: int, tokens: int, padding: int
) -> None:
    shape = ssm_shape(SsmKind.MAMBA2, heads, groups, head_dim, 128)
    config = ReplayConfig(window=WINDOW, max_step_tokens=tokens)
    layer = Layer.make(shape, config, SLOTS, seed=heads + tokens)
    slots = [5, 0, -1, 3, 4, 1, *[-1] * padding]
    counts = [tokens, tokens, tokens, 1, tokens, 0, *[tokens] * padding]
    rows = StepRows(torch.tensor(slots, device="cuda"), torch.tensor(counts, device="cuda"))
    inputs = inputs_of(shape, len(slots), tokens, seed=1)
    faded = faded_heads(layer, rows, inputs["dt"])
    assert 0.2 < faded.float().mean() < 0.8, "heads of both kinds"
    judge, skipping = layer.copy(alike(rows, tokens)), layer.copy()
    for row, slot in enumerate(rows.active_slot.tolist()):
        judge.state.checkpoint.data[slot, faded[row]] = 0.0
        skipping.state.checkpoint.data[slot, faded[row]] = float("nan")
    want, got = judge.step(rows, inputs, None), skipping.step(rows, inputs, SKIP_BELOW)
    assert torch.equal(got, want) and bool(got.isfinite().all())
    flushed = layer.cursors.h[rows.active_slot] + rows.active_num_tokens > WINDOW
    assert bool(flushed.any()) and not bool(flushed.all())
    for row, slot in enumerate(rows.active_slot.tolist()):
        ours, theirs = (each.state.checkpoint.data[slot] for each in (skipping, judge))
        if flushed[row]:
            assert torch.equal(ours, theirs)
        else:
            assert bool(ours[faded[row]].isnan().all()), "a checkpoint that is not read is not written either"
            assert torch.equal(ours[~faded[row]], layer.state.checkpoint.data[slot, ~faded[row]])
    for ours, theirs in zip(skipping.state.ring_tensors(), judge.state.ring_tensors(), strict=True):
        assert torch.equal(ours.view(torch.int8), theirs.view(torch.int8))


@pytest.mark.parametrize("padding", [0, 150], ids=["direct", "streamed"])
def test_without_faded_heads_it_is_the_update(padding: int) -> None:
    shape = ssm_shape(SsmKind.MAMBA2, 16, 2, 64, 128)
    layer = Layer.make(shape, ReplayConfig(window=WINDOW, max_step_tokens=2), SLOTS, seed=5)
    layer.a.fill_(-1e-6)
    slots = [5, 0, 3, 4, 1, *[-1] * padding]
    rows = StepRows(torch.tensor(slots, device="cuda"), torch.full((len(slots),), 2, device="cuda"))
    inputs, judge, skipping = inputs_of(shape, len(slots), 2, seed=2), layer.copy(alike(rows, 2)), layer.copy()
    assert torch.equal(skipping.step(rows, inputs, SKIP_BELOW), judge.step(rows, inputs, None))
    assert torch.equal(skipping.state.checkpoint.data, judge.state.checkpoint.data)


def test_rates_without_bound_fade_unless_nothing_decays() -> None:
    """a = -inf with dt = 0 means no decay at all, not NaN; with dt > 0 the checkpoint is gone."""
    shape = ssm_shape(SsmKind.MAMBA2, 8, 2, 64, 128)
    layer = Layer.make(shape, ReplayConfig(window=WINDOW), 1, seed=7)
    layer.a.fill_(-1e30)
    rows = StepRows(torch.zeros(1, dtype=torch.int64, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda"))
    inputs = inputs_of(shape, 1, 1, seed=3)
    inputs["dt"][..., ::2] = 0.0
    layer.state.checkpoint.data[:, 1::2] = float("nan")
    judge = layer.copy(alike(rows, 1))
    judge.state.checkpoint.data[:, 1::2] = 0.0
    got = layer.step(rows, inputs, SKIP_BELOW)
    assert torch.equal(got, judge.step(rows, inputs, None)) and bool(got.isfinite().all())


@pytest.mark.parametrize("skip_below", [0.0, -1.0, 0.26, float("nan"), float("inf")])
def test_thresholds_outside_the_bound_are_refused(skip_below: float) -> None:
    shape = ssm_shape(SsmKind.MAMBA2, 8, 2, 64, 128)
    layer = Layer.make(shape, ReplayConfig(window=WINDOW), 1, seed=7)
    rows = StepRows(torch.zeros(1, dtype=torch.int64, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda"))
    with pytest.raises(ContractError, match=r"skip_below: expected a number in \(0, 0.25\]"):
        layer.step(rows, inputs_of(shape, 1, 1, seed=3), skip_below)


def test_what_is_not_built_is_refused_with_the_list() -> None:
    shape = ssm_shape(SsmKind.MAMBA2, 64, 1, 64, 128)
    layer = Layer.make(shape, ReplayConfig(window=WINDOW), 1, seed=7)
    rows = StepRows(torch.zeros(1, dtype=torch.int64, device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda"))
    with pytest.raises(UnsupportedError, match="at most 32 heads a group, got 64"):
        layer.step(rows, inputs_of(shape, 1, 1, seed=3), SKIP_BELOW)
    gdn = _abi.DecaySkipArgs(skip_below=SKIP_BELOW, update=_abi.UpdateArgs(kind=3))
    with pytest.raises(ContractError):
        load_library(harness.LIBRARY).decay_skip_update(gdn, 0, 0, 0)
