"""The benchmark's gate on a CPU: green for the reference operations, red for each of the smallest errors of a kernel.

The reference operations stand in for the library. They evaluate records (Eq. 6) and fold (Eq. 5) in another order than
the gate's recurrence, as kernels do.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.native.host_program import built
from trtllm_replayssm.bench.cases import KernelCase, Operation, kernel_cases
from trtllm_replayssm.bench.gate import GateResult, check_launch
from trtllm_replayssm.bench.problem import LaunchMode, Problem
from trtllm_replayssm.bench.rounding import (
    BFLOAT16,
    ELEMENTS,
    FLOAT16,
    STEP_OPERANDS,
    FloatType,
    output_bound,
    state_bound,
    step,
)
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.ops.reference.gdn import gdn_update
from trtllm_replayssm.ops.reference.mamba2 import mamba2_update
from trtllm_replayssm.shapes import SsmKind

# Each type with its codes of finite numbers from zero up.
NUMBERS = {
    "bfloat16": (BFLOAT16, np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)),
    "float16": (FLOAT16, np.arange(0x7C00, dtype=np.uint16).view(np.float16)),
    "e4m3": (ELEMENTS[StateFormat.FP8], np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)),
    "e2m1": (ELEMENTS[StateFormat.NVFP4], np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)),
}
ROWS = 2
Change = Callable[["StandIn", int], None]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_step_is_the_distance_of_neighbours(name: str) -> None:
    kind, numbers = NUMBERS[name]
    values = numbers.astype(np.float64)
    lower, distance = values[:-1], np.diff(values)
    assert (step(torch.from_numpy(lower), kind).numpy() == distance).all()
    between = torch.from_numpy(lower + 0.75 * distance)
    assert (step(between, kind).numpy() == distance).all(), "anywhere in a binade"


@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16])
def test_a_right_result_beside_a_tie_is_within_the_bound_and_its_neighbour_is_not(kind: FloatType) -> None:
    """The value just below a tie and a float32 sum just above it: more than half a step off, and right."""
    half = 2.0**-kind.bits
    exact, magnitude = torch.tensor([1.0 + half - 1e-8, 10.0], dtype=torch.float64)
    bound = output_bound(exact, magnitude, kind, 2.0**-22)
    rounded_up, rounded_down, beyond = 1.0 + 2 * half, 1.0, 1.0 + 4 * half
    assert half < rounded_up - float(exact) <= float(bound)
    assert float(exact) - rounded_down <= float(bound) < beyond - float(exact)
    assert float(bound) < 1.01 * half, "no more than noise beside half a step"


PROGRAM = r"""
#include <cstdio>
#include "bench/rounding.h"
int main() {
  double exact, magnitude, share, rounded;
  while (std::scanf("%lf %lf %lf %lf", &exact, &magnitude, &share, &rounded) == 4)
    std::printf("%a %a %a\n", rounding::outputBound(exact, magnitude, rounding::kBfloat16, share, rounded),
                rounding::step(exact, rounding::kFloat16), rounding::stateBound(share));
}
"""


def test_the_program_s_gate_has_the_same_bounds(tmp_path: Path) -> None:
    binary = built(tmp_path, PROGRAM)
    rng = np.random.default_rng(3)
    exact = np.concatenate([[0.0, 1.0, 1.0 - 2.0**-30, -2.0], rng.standard_normal(60) * 10.0 ** rng.uniform(-9, 5, 60)])
    rest = 10.0 ** rng.uniform([-3, -8, -9], [3, -3, -2], (64, 3))
    lines = "\n".join(" ".join(x.hex() for x in (float(e), *map(float, r))) for e, r in zip(exact, rest, strict=True))
    printed = subprocess.run([str(binary)], input=lines, check=True, capture_output=True, text=True).stdout.splitlines()
    theirs = np.array([[float.fromhex(x) for x in line.split()] for line in printed])
    for e, (magnitude, share, rounded), found in zip(exact, rest, theirs, strict=True):
        one = [torch.tensor(x, dtype=torch.float64) for x in (e, magnitude, rounded)]
        bound = output_bound(one[0], one[1], BFLOAT16, max(share, STEP_OPERANDS), one[2])
        assert found == pytest.approx([float(bound), float(step(one[0], FLOAT16)), state_bound(share)], rel=1e-14)


@dataclass
class Library:
    """Needs no workspace."""

    def update_workspace(self, args: Any) -> int:
        return 0


class StandIn(Problem):
    """A problem whose launch is the reference operation; `change` spoils what it reads, `spoil` what it gave."""

    change: Change | None = None
    spoil: Change | None = None
    factor = 1.0

    def run(self, rotation: int, h: int, mode: LaunchMode = LaunchMode.PLAIN) -> None:
        assert self.state is not None
        if self.change is not None:
            self.change(self, h)
        i, rows = self.inputs, StepRows(self.slots[rotation].long(), self.num_tokens.long())
        if self.case.shape.kind is SsmKind.GDN:
            args = (i["q"], i["k"], i["value"], i["log_decay"] * self.factor, i["beta"])
            self.out.copy_(gdn_update(self.state, self.cursors, rows, *args))
        else:
            args = (i["value"], i["k"], i["q"], i["dt"], i["a"] * self.factor)
            self.out.copy_(mamba2_update(self.state, self.cursors, rows, *args, d_skip=i["skip"]))
        if self.spoil is not None:
            self.spoil(self, h)


def case_of(shape_name: str, tokens: int, recurrence: StateFormat, read: StateFormat | None) -> KernelCase:
    """Of the list, with few heads."""
    wanted = (shape_name, Operation.UPDATE, tokens, 16, recurrence, read)
    case = next(
        c for c in kernel_cases()
        if (c.shape_name, c.operation, c.tokens, c.window, c.recurrence, c.read) == wanted
    )  # fmt: skip
    heads = 2 * case.shape.heads_per_group
    return replace(case, rows=ROWS, shape=replace(case.shape, heads=heads, groups=2))


def check(case: KernelCase, h: int, **changes: Change) -> GateResult:
    problem = StandIn(case, Library(), torch.device("cpu"), cold=False)  # type: ignore[arg-type]
    for name, change in changes.items():
        setattr(problem, name, change)
    return check_launch(problem, h)


FP32, FP16, FP8, FP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4
RIGHT = [(FP32, None), (FP32, FP4), (FP16, None), (FP8, None)]


@pytest.mark.parametrize("h", [0, 1, 8, 16])
@pytest.mark.parametrize(("recurrence", "read"), RIGHT)
@pytest.mark.parametrize("shape_name", ["nano4b", "qwen4b"])
def test_the_reference_operations_pass(
    shape_name: str, recurrence: StateFormat, read: StateFormat | None, h: int
) -> None:
    found = check(case_of(shape_name, 1, recurrence, read), h)
    assert found.green, found
    assert found.output_share > 0.9, "a bound that half the type's steps do not come near is not the bound"


@pytest.mark.parametrize("h", [8, 16])
@pytest.mark.parametrize("shape_name", ["nano4b", "qwen4b"])
def test_verification_passes(shape_name: str, h: int) -> None:
    found = check(case_of(shape_name, 8, FP32, None), h)
    assert found.green and found.output_share > 0.9, found


def one_bit(problem: StandIn, h: int) -> None:
    """One output of all becomes its neighbour away from zero."""
    problem.out.view(torch.int16)[1, -1, 3, 7] += 1


def one_record_less(problem: StandIn, h: int) -> None:
    problem.cursors.h.fill_(h - 1)


def slightly_wrong_decay(problem: StandIn, h: int) -> None:
    problem.factor = 1.0 + 2.0**-7


def one_code(problem: StandIn, h: int) -> None:
    """One element of one checkpoint copy becomes its second neighbour."""
    assert problem.state is not None
    store = problem.state.read_copy or problem.state.checkpoint
    store.data.view(torch.int16 if store.format is FP16 else torch.uint8)[1, 1, 5, 9] ^= 2


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("shape_name", ["nano4b", "qwen4b"])
def test_one_output_off_by_its_last_bit_is_red(shape_name: str, tokens: int) -> None:
    found = check(case_of(shape_name, tokens, FP32, None), 4, spoil=one_bit)
    assert found.output_share > 1.2 and not found.green, found


@pytest.mark.parametrize("h", [8, 16])
@pytest.mark.parametrize("change", [one_record_less, slightly_wrong_decay])
@pytest.mark.parametrize("shape_name", ["nano4b", "qwen4b"])
def test_a_missing_record_and_a_wrong_decay_are_red(shape_name: str, change: Change, h: int) -> None:
    found = check(case_of(shape_name, 1, FP32, None), h, change=change)
    assert found.output_share > 1.0 and (h < 16 or change is slightly_wrong_decay or found.state_share > 1.0), found


@pytest.mark.parametrize(("recurrence", "read"), [(FP16, None), (FP8, None), (FP32, FP4)])
def test_one_stored_element_off_by_more_than_a_step_is_red(recurrence: StateFormat, read: StateFormat | None) -> None:
    found = check(case_of("nano4b", 1, recurrence, read), 16, spoil=one_code)
    assert found.output_share <= 1.0 < found.state_share, found


def test_nan_is_red() -> None:
    def poison(problem: StandIn, h: int) -> None:
        problem.out[0, 0, 0, 0] = float("nan")

    assert not check(case_of("nano4b", 1, FP32, None), 4, spoil=poison).green
