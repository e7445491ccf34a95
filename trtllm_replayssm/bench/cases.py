"""The cases of the kernel benchmark, from `kernel_cases.inc`, which the C++ program and the tests read as well."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec import traffic
from trtllm_replayssm.spec.cursors import Cursors, commit

ACT_BYTES = 2  # activations of all cases are bfloat16
_ENTRY = re.compile(r"^RSSM_(SHAPE|CASE)\(([^)]*)\)$")


class Operation(str, Enum):
    """What is timed: a replay step, the conventional step (T > 1: a snapshot after each token), or a whole prompt."""

    UPDATE = "update"
    CONVENTIONAL = "conventional"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One operation on one layer of a named shape: B rows of T tokens, window L (0: none)."""

    shape_name: str
    shape: SsmShape
    suite: str
    operation: Operation
    rows: int
    tokens: int
    window: int
    recurrence: StateFormat
    read: StateFormat | None

    @property
    def config(self) -> ReplayConfig:
        """The pool's settings; of a conventional case only `max_step_tokens` means anything."""
        return ReplayConfig(
            window=self.window or max(self.tokens, 1),
            max_step_tokens=1 if self.operation is Operation.PREFILL else self.tokens,
            recurrence=self.recurrence, read=self.read,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """A readable id."""
        formats = self.recurrence.value + (f"-{self.read.value}" if self.read else "")
        return f"{self.shape_name}-{self.operation.value}-B{self.rows}-T{self.tokens}-L{self.window}-{formats}"

    def cycle(self, accepted: int) -> list[int]:
        """The committed records h before each step of a steady run that keeps `accepted` tokens a step."""
        if self.operation is not Operation.UPDATE:
            return [0]
        cursors, seen = Cursors(), []
        while cursors.h not in seen:
            seen.append(cursors.h)
            commit(self.config, cursors, self.tokens, accepted)
        return seen[seen.index(cursors.h) :]

    def floor_bytes(self, h: int) -> int:
        """Bytes that a step with h committed records must move: state, records, inputs and outputs of all rows.

        A prompt reads the state and writes every copy; of its own records it needs none.
        """
        if self.operation is Operation.CONVENTIONAL:
            step = traffic.conventional_step_bytes(self.shape, self.recurrence, self.tokens, ACT_BYTES)
        elif self.operation is Operation.PREFILL:
            step = traffic.prompt_bytes(self.shape, self.config, self.tokens, ACT_BYTES)
        else:
            step = traffic.step_bytes(self.shape, self.config, h, self.tokens, ACT_BYTES)
        return self.rows * (step.total + step.io)


@cache
def kernel_shapes() -> dict[str, SsmShape]:
    """The shapes by name."""
    shapes = {}
    for name, kind, heads, groups, head_dim, state_dim in _entries("SHAPE"):
        shapes[name] = SsmShape(
            kind=SsmKind(kind), heads=int(heads), groups=int(groups), head_dim=int(head_dim), state_dim=int(state_dim),
            conv_kernel=4, conv_bias=kind == SsmKind.MAMBA2.value,
        )  # fmt: skip
    return shapes


@cache
def kernel_cases() -> tuple[KernelCase, ...]:
    """Every case on every shape, in the file's order, shape by shape."""
    cases = []
    for shape_name, shape in kernel_shapes().items():
        for suite, operation, rows, tokens, window, recurrence, read in _entries("CASE"):
            cases.append(
                KernelCase(
                    shape_name=shape_name, shape=shape, suite=suite, operation=Operation(operation), rows=int(rows),
                    tokens=int(tokens), window=int(window), recurrence=StateFormat(recurrence),
                    read=None if read == "none" else StateFormat(read),
                )
            )  # fmt: skip
    return tuple(cases)


def suites() -> list[str]:
    """The names of the suites, in the file's order."""
    return list(dict.fromkeys(case.suite for case in kernel_cases()))


def _entries(kind: str) -> list[list[str]]:
    text = (files("trtllm_replayssm.bench") / "kernel_cases.inc").read_text(encoding="utf-8")
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith("//"):
            continue
        match = _ENTRY.match(line)
        if match is None:
            raise ConfigError(
                "kernel_cases.inc", f"line {number}", expected="RSSM_SHAPE(...) or RSSM_CASE(...)", got=line
            )
        if match[1] == kind:
            found.append([field.strip() for field in match[2].split(",")])
    return found
