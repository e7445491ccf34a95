"""Correctness gate of the benchmark: one launch of a small batch against the recurrence in float64.

Checks outputs and, on a flush, every checkpoint that was written; after the conventional step every snapshot. What is
true is computed here, from the stored bytes, token by token (paper, Eq. 1 and 9), by no operation of the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.problem import Problem
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.launches import UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import L2_EPS, SsmKind

ROWS = (1, 3, 24)  # one for each launch choice of the update
PROMPT_TOKENS = 200  # of a prompt, at most: more than three chunks of its scan, the last one not full
OUTPUT_BOUND = 2.0**-8  # of the head's largest output: one bfloat16 rounding
# Of the head's largest state. float32: the fold's own rounding; a TF32 or BF16 operand is off by 4e-4 and more. The
# others: one step of the format, as stochastic rounding may take either neighbour.
STATE_BOUND = {
    StateFormat.FLOAT32: 2e-6,
    StateFormat.FLOAT16: 2.0**-10,
    StateFormat.FP8: 2.0**-3,
    StateFormat.NVFP4: 2.0**-1,
}
PROMPT_STATE_BOUND = 1e-5  # a prompt folds its tokens chunk by chunk, not one by one


@dataclass(frozen=True, slots=True)
class GateResult:
    """Largest errors relative to the head's largest value, and whether all are within their bounds. NaN is not."""

    output_error: float
    state_error: float
    green: bool


def run_gate(
    case: KernelCase, library: _abi.Library, rows: Sequence[int] = ROWS, launch: UpdateLaunch | None = None
) -> GateResult:
    """The case's operation at several h; raises what the library raises when it has no kernel.

    rows: the batches. launch: of an update, None: the library's choice.
    """
    output = state = 0.0
    green = True
    prompt = case.operation is Operation.PREFILL
    tokens = min(case.tokens, PROMPT_TOKENS) if prompt else case.tokens
    for batch in rows:
        problem = Problem(replace(case, rows=batch, tokens=tokens), library, cold=False, launch=launch)
        for h in _depths(case):  # what one launch leaves is the next one's input
            problem.set_pending(h)
            problem.out.fill_(math.nan)
            found, errors = _run(problem, h)
            output, state = max(output, found), max(state, *errors.values(), 0.0) if errors else state
            bounds = {**STATE_BOUND, StateFormat.FLOAT32: PROMPT_STATE_BOUND} if prompt else STATE_BOUND
            green &= found <= OUTPUT_BOUND and all(e <= bounds[f] for f, e in errors.items())
    return GateResult(output, state, green)


def _depths(case: KernelCase) -> list[int]:
    if case.operation is Operation.CONVENTIONAL:
        return [0]
    step = case.config.max_step_tokens
    return sorted({0, 1, case.window // 2, case.window - step, case.window})


def _run(problem: Problem, h: int) -> tuple[float, dict[StateFormat, float]]:
    """Error of the outputs, and of every state that was written by its format."""
    expected, written = Truth(problem, h).step()
    problem.run(0, h)
    torch.cuda.synchronize()
    errors: dict[StateFormat, float] = {}
    if problem.state is None:
        assert problem.states is not None
        got = problem.states[problem.slots[0].long()].double().unflatten(-1, written[0].shape[-2:])
        entries = got.shape[1]
        errors[StateFormat.FLOAT32] = max(
            relative_error(got[:, (t + 1) % entries], state, axes=(-2, -1)) for t, state in enumerate(written)
        )
    elif written:
        for store in (problem.state.checkpoint, problem.state.read_copy):
            if store is not None:
                errors[store.format] = relative_error(
                    store.load(problem.slots[0].long()).double(), written[0], axes=(-2, -1)
                )
    axes = (1, 3) if problem.prompt else (3,)  # a prompt's products are split by heads, not by tokens
    return relative_error(problem.out.double(), expected, axes), errors


def relative_error(got: Tensor, expected: Tensor, axes: tuple[int, ...]) -> float:
    """Largest error of a head over its largest value; `axes` are those within a head. Infinite for NaN."""
    error = (got - expected).abs().amax(axes)
    value = float((error / expected.abs().amax(axes).clamp(min=1e-30)).max())
    return value if value == value else math.inf


class Truth:
    """The rows of one problem in float64, from what is stored before the launch."""

    def __init__(self, problem: Problem, h: int) -> None:
        self.problem, self.h = problem, h
        self.case, self.gdn = problem.case, problem.case.shape.kind is SsmKind.GDN
        self.slot = problem.slots[0].long()
        self.repeat = self.case.shape.heads_per_group
        self.inputs = {name: tensor.double() for name, tensor in problem.inputs.items()}

    def step(self) -> tuple[Tensor, list[Tensor]]:
        """Outputs [B, T, H, P] and the states [B, H, P, N] that must be written: none without a flush.

        A prompt writes the state behind it, a conventional step one behind each token.
        """
        written: list[Tensor] = []
        if self.problem.states is not None:
            shape = self.case.shape
            state = self.problem.states[self.slot, 0].double().unflatten(-1, (shape.head_dim, shape.state_dim))
        else:
            state, flushed = self._committed()
            written = [state] if flushed else []
        outputs = []
        for token in range(self.case.tokens):
            out, state = self.token(state, token)
            outputs.append(out)
            if self.problem.states is not None:
                written.append(state)
        if self.problem.prompt:
            written = [state]
        return torch.stack(outputs, dim=1), written

    def _committed(self) -> tuple[Tensor, bool]:
        """The state with the committed records, and whether the step folds them."""
        layer = self.problem.state
        assert layer is not None
        flushed = self.problem.prompt or self.h + self.case.tokens > self.case.window
        source = layer.checkpoint if flushed or layer.read_copy is None else layer.read_copy
        return self.fold(source.load(self.slot).double(), flushed), flushed

    def fold(self, state: Tensor, flushed: bool) -> Tensor:
        """`state` [B, H, P, N] with the committed records, as a flush or a read takes them."""
        layer = self.problem.state
        assert layer is not None
        origin = self.problem.cursors.origin[self.slot].long()
        for j in range(self.h):
            row = (origin + j) % self.case.config.ring_rows
            key = self._heads(layer.ring_key[self.slot, :, row].double())
            value, decay = layer.ring_value[self.slot, :, row].double(), layer.ring_decay[self.slot, :, row].double()
            if not self.gdn:
                value, decay = value * decay[..., None], decay * self.inputs["a"]
            else:
                assert layer.ring_key_factor is not None
                key = key * self._heads(layer.ring_key_factor[self.slot, :, row].double()[..., None])
                if flushed and layer.ring_v is not None and layer.ring_beta is not None:
                    raw = layer.ring_v[self.slot, :, row].double(), layer.ring_beta[self.slot, :, row].double()
                    value = _correction(state, key, decay, *raw)
            state = _apply(state, key, value, decay)
        return state

    def token(self, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Output [B, H, P] of one of the inputs' tokens, and the state after it."""
        inputs = {name: tensor[:, token] for name, tensor in self.inputs.items() if name not in ("a", "skip")}
        key, query, value = self._heads(inputs["k"]), self._heads(inputs["q"]), inputs["value"]
        if self.gdn:
            key = key / (key.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
            query = query / ((query.square().sum(-1, keepdim=True) + L2_EPS) * query.shape[-1]).sqrt()
            value = _correction(state, key, inputs["log_decay"], value, inputs["beta"])
            state = _apply(state, key, value, inputs["log_decay"])
            return _read(state, query), state
        state = _apply(state, key, value * inputs["dt"][..., None], inputs["dt"] * self.inputs["a"])
        return _read(state, query) + self.inputs["skip"][:, None] * value, state

    def _heads(self, groups: Tensor) -> Tensor:
        """[B, G, n] -> [B, H, n]."""
        return groups.repeat_interleave(self.repeat, dim=1)


def _read(state: Tensor, vector: Tensor) -> Tensor:
    return (state @ vector[..., None])[..., 0]


def _apply(state: Tensor, key: Tensor, value: Tensor, log_decay: Tensor) -> Tensor:
    return log_decay.exp()[..., None, None] * state + value[..., :, None] * key[..., None, :]


def _correction(state: Tensor, key: Tensor, log_decay: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    return beta[..., None] * (value - log_decay.exp()[..., None] * _read(state, key))
