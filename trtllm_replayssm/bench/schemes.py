"""Our own implementations of the recovery schemes that came before (paper, Appendix A), as sequences of native steps.

Each verifies T tokens a row after a step that kept `accepted`, on float32 states [S, H, P * N], and leaves what its
next step needs. They are written for the same machine with the same care as the conventional kernel, but they are ours:
the numbers say what a scheme's state traffic costs, not how fast somebody else's code is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.gate import float_states, output_share
from trtllm_replayssm.bench.problem import Problem
from trtllm_replayssm.bench.timing import time_cases
from trtllm_replayssm.bench.truth import Expected, Truth
from trtllm_replayssm.ops import _abi, torch_ops
from trtllm_replayssm.ops.views import current_stream

_GATE_ROWS = 5
_CACHED = ("value", "k", "dt", "log_decay", "beta")


class Scheme(str, Enum):
    """Reads and writes of a whole state a step."""

    REPLAY_TWO_WRITES = "replay + 2 writes"  # 1R + 2W: The Mamba in the Llama
    ACTIVATION_REPLAY = "activation replay"  # 3R + 3W: Snakes and Ladders
    JOINT_ATTAINMENT = "joint attainment"  # 3R + 4W: Snakes and Ladders
    MASKED_REPLAY = "masked replay + read-only verify"  # 2R + 1W: STree


TRAFFIC = {
    Scheme.REPLAY_TWO_WRITES: (1, 2),
    Scheme.ACTIVATION_REPLAY: (3, 3),
    Scheme.JOINT_ATTAINMENT: (3, 4),
    Scheme.MASKED_REPLAY: (2, 1),
}


@dataclass
class SchemeProblem:
    """A conventional problem's inputs, this step's and the step's before, and as many states as the scheme keeps."""

    case: KernelCase
    native: _abi.Library
    scheme: Scheme
    accepted: int
    base: Problem = field(init=False)
    checkpoint: Tensor = field(init=False)  # [S, H, P * N]
    working: Tensor = field(init=False)
    spare: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.base = Problem(self.case, self.native, cold=False, entries=3)
        assert self.base.states is not None
        self.checkpoint, self.working, self.spare = self.base.states.unbind(1)
        self.cached = {f"cached_{n}": t.flip(0) for n, t in self.base.inputs.items() if n in _CACHED}
        self.replayed = torch.full_like(self.base.num_tokens, self.accepted)

    def run(self) -> None:
        """One step of the scheme."""
        checkpoint, working = self.checkpoint, self.working
        if self.scheme is Scheme.REPLAY_TWO_WRITES:
            self._launch(source=checkpoint, recovered=checkpoint, end=working, replay=True)
        elif self.scheme is Scheme.ACTIVATION_REPLAY:
            self._launch(source=checkpoint, recovered=checkpoint, replay=True, verify=False)
            self._launch(source=checkpoint, end=working, verify=False)
            self._launch(source=working, end=working)
        elif self.scheme is Scheme.JOINT_ATTAINMENT:
            # the state to go back to, the row that backtracks from it, and the row that verifies behind the same tokens
            self._launch(source=checkpoint, end=working, verify=False)
            self._launch(source=checkpoint, recovered=checkpoint, end=self.spare, replay=True, verify=False)
            self._launch(source=working, end=working, replay=True)
        else:
            self._launch(source=checkpoint, recovered=checkpoint, replay=True, verify=False)
            self._launch(source=checkpoint)

    def floor_bytes(self) -> int:
        """Bytes of state that the scheme moves, with the inputs and outputs of the verified tokens."""
        reads, writes = TRAFFIC[self.scheme]
        shape = self.case.shape
        state = 4 * shape.heads * shape.head_dim * shape.state_dim
        one = self.case.floor_bytes(0) - self.case.rows * state * (1 + self.case.tokens)
        return self.case.rows * state * (reads + writes) + one

    def _launch(
        self, *, source: Tensor, recovered: Tensor | None = None, end: Tensor | None = None, replay: bool = False,
        verify: bool = True,
    ) -> None:  # fmt: skip
        base = self.base
        tokens = {name: t if verify or name in ("a", "skip") else t[:, :0] for name, t in base.inputs.items()}
        tensors: dict[str, Tensor | None] = {
            **tokens, "slot": base.slots[0], "num_tokens": base.num_tokens,
            "out": base.out if verify else base.out[:, :0],
            "source": source, "recovered": recovered, "end": end,
        }  # fmt: skip
        if replay:
            tensors |= {**self.cached, "replayed": self.replayed}
        args = torch_ops.fill(_abi.RecoveryArgs, tensors, kind=base.kind, flags=0)
        self.native.recovery_step(args, current_stream(base.out))


def run_schemes(
    cases: Sequence[KernelCase], library: _abi.Library, bandwidth: float, *, rounds: int
) -> Iterator[dict[str, Any]]:
    """One row per scheme, verification of the list and way of accepting; a scheme whose gate is red is not timed."""
    for case in cases:
        if case.operation is not Operation.CONVENTIONAL or case.tokens == 1:
            continue
        for scheme in Scheme:
            small = replace(case, rows=_GATE_ROWS)
            green = all(scheme_gate(SchemeProblem(small, library, scheme, a)) for a in (1, case.tokens))
            for accepted in (case.tokens, 1):
                yield _time(SchemeProblem(case, library, scheme, accepted), bandwidth, rounds, green=green)
                torch.cuda.empty_cache()


def scheme_gate(problem: SchemeProblem) -> bool:
    """Outputs, and the state that the accepted tokens lead to, against the recurrence in float64."""
    base, shape = problem.base, problem.case.shape
    (recovered, outputs), (plain_state, plain) = (_expected(problem, d) for d in (torch.float64, torch.float32))
    problem.run()
    got = problem.checkpoint[base.slots[0].long()].unflatten(-1, (shape.head_dim, shape.state_dim))
    return (
        float_states(got, recovered, plain_state).green and output_share(base.out, outputs, plain, prompt=False) <= 1.0
    )


def _expected(problem: SchemeProblem, dtype: torch.dtype) -> tuple[Tensor, Expected]:
    """The state behind the accepted tokens of the step before, and what this step's tokens give from there."""
    base, shape = problem.base, problem.case.shape
    before, after = Truth(base, 0, dtype), Truth(base, 0, dtype)
    before.inputs = {n: t if n in ("a", "skip") else t.flip(0) for n, t in before.inputs.items()}
    stored = problem.checkpoint[base.slots[0].long()]
    state = before.start(stored.unflatten(-1, (shape.head_dim, shape.state_dim)))
    for token in range(problem.accepted):
        _, state = before.token(state, token)
    return state.value, after.outputs(state)


def _time(problem: SchemeProblem, bandwidth: float, rounds: int, *, green: bool) -> dict[str, Any]:
    case, (reads, writes) = problem.case, TRAFFIC[problem.scheme]
    row: dict[str, Any] = {
        "what": f"{problem.scheme.value} (our implementation)", "shape": case.shape_name, "B": case.rows,
        "T": case.tokens, "L": 0, "recurrence": case.recurrence.value, "read": None, "accepted": problem.accepted,
        "programmatic": False, "settled": False, "states_read": reads, "states_written": writes,
    }  # fmt: skip
    if not green:
        return {**row, "reason": "the gate is red"}
    timing = time_cases([(problem.run, 1)], rounds)[0]
    floor = problem.floor_bytes() / bandwidth * 1e6
    return {
        **row, "us": round(timing.median, 3), "us_quartiles": [round(timing.low, 3), round(timing.high, 3)],
        "GBs": round(problem.floor_bytes() / timing.median * 1e-3, 1), "floor_us": round(floor, 2),
        "percent_of_floor": round(100 * floor / timing.median, 1),
    }  # fmt: skip
