"""Correctness gate of the benchmark: one launch of a small batch against the recurrence in float64.

Checks outputs and, on a flush, every checkpoint that was written; after the conventional step every snapshot. What is
true is in `truth`, how far a launch may be from it in `rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.problem import Problem
from trtllm_replayssm.bench.rounding import (
    BFLOAT16,
    ELEMENTS,
    PROMPT_OPERANDS,
    STEP_OPERANDS,
    excess,
    lost,
    output_bound,
    state_bound,
    stored_bound,
)
from trtllm_replayssm.bench.truth import Expected, Truth
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.launches import UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.state_store import StateStore

ROWS = (1, 3, 24)  # one for each launch choice of the update
PROMPT_TOKENS = 200  # of a prompt, at most: more than three chunks of its scan, the last one not full
_TINY = 1e-30  # of a head of zeros


@dataclass(frozen=True, slots=True)
class GateResult:
    """Largest errors: relative to the head's largest value, and over their bounds, which right results keep to.

    Infinite where a result is NaN.
    """

    output_error: float = 0.0
    state_error: float = 0.0
    output_share: float = 0.0
    state_share: float = 0.0

    @property
    def green(self) -> bool:
        """Whether every error is within its bound."""
        return self.output_share <= 1.0 and self.state_share <= 1.0

    def worst(self, other: GateResult) -> GateResult:
        """The larger of each."""
        return GateResult(
            max(self.output_error, other.output_error), max(self.state_error, other.state_error),
            max(self.output_share, other.output_share), max(self.state_share, other.state_share),
        )  # fmt: skip


def run_gate(
    case: KernelCase, library: _abi.Library, rows: Sequence[int] = ROWS, launch: UpdateLaunch | None = None
) -> GateResult:
    """The case's operation at several h; raises what the library raises when it has no kernel.

    rows: the batches. launch: of an update, None: the library's choice.
    """
    found = GateResult()
    tokens = min(case.tokens, PROMPT_TOKENS) if case.operation is Operation.PREFILL else case.tokens
    for batch in rows:
        problem = Problem(replace(case, rows=batch, tokens=tokens), library, cold=False, launch=launch)
        for h in _depths(case):  # what one launch leaves is the next one's input
            found = found.worst(check_launch(problem, h))
    return found


def _depths(case: KernelCase) -> list[int]:
    if case.operation is Operation.CONVENTIONAL:
        return [0]
    step = case.config.max_step_tokens
    return sorted({0, 1, case.window // 2, case.window - step, case.window})


def check_launch(problem: Problem, h: int) -> GateResult:
    """One launch with h committed records in every slot, and what it left, compared."""
    problem.set_pending(h)
    problem.out.fill_(math.nan)
    expected, plain = Truth(problem, h).step(), Truth(problem, h, torch.float32).step()
    problem.run(0, h)
    axes = (1, 3) if problem.prompt else (3,)
    found = GateResult(
        output_error=relative_error(problem.out, expected.outputs.value, axes),
        output_share=output_share(problem.out, expected, plain, prompt=problem.prompt),
    )
    for state in _states(problem, expected, plain):
        found = found.worst(state)
    return found


def output_share(out: Tensor, expected: Expected, plain: Expected, *, prompt: bool) -> float:
    """Largest error of bfloat16 outputs [B, T, H, P] over its bound; plain: the same formula in float32."""
    exact, magnitude = expected.outputs
    share = max(PROMPT_OPERANDS if prompt else STEP_OPERANDS, lost(plain.outputs.value, exact, magnitude))
    return excess(out, exact, output_bound(exact, magnitude, BFLOAT16, share, expected.rounding))


def _states(problem: Problem, expected: Expected, plain: Expected) -> list[GateResult]:
    slots, pairs = problem.slots[0].long(), list(zip(expected.states, plain.states, strict=True))
    if problem.states is not None:
        got = problem.states[slots].unflatten(-1, expected.states[0].shape[-2:])
        return [float_states(got[:, (t + 1) % got.shape[1]], *pair) for t, pair in enumerate(pairs)]
    assert problem.state is not None
    if not pairs:
        return []
    (pair,), config = pairs, problem.case.config
    found = [_stored(problem.state.checkpoint, slots, *pair, config.recurrence_rounding)]
    if problem.state.read_copy is not None:
        found.append(_stored(problem.state.read_copy, slots, *pair, Rounding.NEAREST))
    return found


def _stored(store: StateStore, slots: Tensor, exact: Tensor, plain: Tensor, rounding: Rounding) -> GateResult:
    """What a copy holds, by a step of its format at each element."""
    got = store.load(slots)
    if store.format is StateFormat.FLOAT32:
        return float_states(got, exact, plain)
    largest = exact.abs().amax((-2, -1), keepdim=True).clamp(min=_TINY)
    noise = state_bound(relative_error(plain, exact, (-2, -1))) * largest
    scale = _scale(store, slots, exact)
    bound = stored_bound(exact, scale, ELEMENTS[store.format], noise, nearest=rounding is Rounding.NEAREST)
    return GateResult(state_error=relative_error(got, exact, (-2, -1)), state_share=excess(got, exact, bound))


def _scale(store: StateStore, slots: Tensor, exact: Tensor) -> Tensor:
    """What multiplies each code of the states `exact` [B, H, P, N]."""
    if store.block_scale is None:
        return torch.ones_like(exact)
    scale = store.block_scale.float()[slots].double()
    if store.head_scale is not None:
        scale = scale * store.head_scale[slots].double()[..., None, None]
    return scale.repeat_interleave(exact.shape[-1] // scale.shape[-1], dim=-1)


def float_states(got: Tensor, exact: Tensor, plain: Tensor) -> GateResult:
    """Float32 states [B, H, P, N]; plain: the same formula in float32."""
    error, share = (relative_error(states, exact, (-2, -1)) for states in (got, plain))
    return GateResult(state_error=error, state_share=error / state_bound(share))


def relative_error(got: Tensor, expected: Tensor, axes: tuple[int, ...]) -> float:
    """Largest error of a head over its largest value; `axes` are those within a head. Infinite for NaN."""
    error = (got.double() - expected).abs().amax(axes)
    value = float((error / expected.abs().amax(axes).clamp(min=_TINY)).max())
    return value if value == value else math.inf
