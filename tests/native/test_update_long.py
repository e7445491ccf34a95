"""Long runs of the native update: many flushes of the production shapes, a thousand steps of continuous batching."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.twin import Twin
from trtllm_replayssm.bench.cases import KernelCase, Operation, kernel_cases
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

FLUSHES = 64
STATE_BOUND = 1e-5  # of the head's largest value, after all of them; a TF32 operand is off by 4e-4 after the first
SHAPES = [
    case
    for case in kernel_cases()
    if case.operation is Operation.UPDATE and case.suite == "plain" and case.rows == 1
    and case.recurrence is StateFormat.FLOAT32
]  # fmt: skip


@pytest.mark.parametrize(("rows", "tokens"), [(3, 1), (96, 1), (3, 8), (24, 4), (24, 8)])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda case: case.shape_name)
def test_checkpoints_follow_the_recurrence_through_many_flushes(
    library: _abi.Library, shape: KernelCase, rows: int, tokens: int
) -> None:
    """The float64 recurrence goes on from its own states, on the records that are stored before each flush."""
    import torch

    from trtllm_replayssm.bench.problem import Problem
    from trtllm_replayssm.bench.truth import Truth

    case = replace(shape, rows=rows, tokens=tokens)
    problem = Problem(case, library, cold=False)
    assert problem.state is not None
    slots = problem.slots[0].long()
    state = problem.state.checkpoint.load(slots).double()
    errors = []
    for _ in range(FLUSHES):
        problem.cursors.origin.add_(5).remainder_(case.config.ring_rows)
        truth = Truth(problem, case.window)
        state = truth.fold(truth.start(state), flushed=True).value
        problem.run(0, case.window)
        stored = problem.state.checkpoint.load(slots).double()
        error = (stored - state).abs().amax((-2, -1)) / state.abs().amax((-2, -1))
        errors.append(float(error.max()))
    torch.cuda.synchronize()
    print(f"{case.name}: {errors[0]:.1e} after one flush, {errors[-1]:.1e} after {FLUSHES}")
    assert errors[-1] <= STATE_BOUND


@pytest.mark.parametrize(("kind", "head_dim"), [(SsmKind.MAMBA2, 64), (SsmKind.MAMBA2, 80), (SsmKind.GDN, 128)])
def test_thousand_steps_of_continuous_batching(library: _abi.Library, kind: SsmKind, head_dim: int) -> None:
    """Sequences arrive, finish and take over used slots; rows are plain, drafted or padding, and accept any prefix.

    Outputs are compared after every step; whole states, which say the same of all steps before, after every tenth.
    """
    shape = ssm_shape(kind, heads=2, groups=1, head_dim=head_dim, state_dim=128)
    twin = Twin(library, shape, ReplayConfig(window=16, max_step_tokens=8), "bfloat16", slots=5)
    live: list[int] = []
    for step in range(1000):
        if live and twin.rng.random() < 0.1:
            live.remove(int(twin.rng.choice(live)))
        free = [slot for slot in range(5) if slot not in live]
        if free and (not live or twin.rng.random() < 0.2):
            slot = int(twin.rng.choice(free))
            twin.admit(slot, origin=int(twin.rng.integers(0, 24)))
            live.append(slot)
        tokens = int(twin.rng.choice([1, 1, 4, 8]))
        scheduled = [slot for slot in twin.rng.permutation(live).tolist() if twin.rng.random() < 0.8]
        rows = scheduled + [-1] * int(twin.rng.integers(0, 3)) + [-1] * (600 if step % 10 == 0 else 0)
        if not rows:
            continue
        counts = [int(twin.rng.integers(0, tokens + 1)) for _ in rows]
        accepted = [int(twin.rng.integers(0, count + 2)) for count in counts]
        twin.step(rows, counts, accepted, tokens, states=step % 10 == 9)
