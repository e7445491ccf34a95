"""What one step measurement is, how rows accept tokens, and how far its sequences grow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from trtllm_replayssm.checks import require_positive
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ConfigError

REPLAY, CONVENTIONAL = "replay", "conventional"
CACHES = (REPLAY, CONVENTIONAL)
EQUAL, LARGEST = "equal", "largest"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCase:
    """One measurement: `rows` sequences around `context` committed tokens take steps of `tokens` tokens.

    accepted: mean tokens that a step commits, 1 for plain decoding. role: "equal" (a batch that was asked for) or
    "largest" (as many rows as the memory holds with this cache).
    """

    cache: str
    rows: int
    tokens: int
    accepted: float
    context: int
    replay: ReplayConfig
    role: str = EQUAL

    def __post_init__(self) -> None:
        if self.cache not in CACHES:
            raise ConfigError("bench step", "state_cache", expected=f"of {', '.join(CACHES)}", got=repr(self.cache))
        if not 1 <= self.tokens <= self.replay.max_step_tokens or self.rows < 1:
            raise ConfigError(
                "bench step", "batch, tokens", expected=f"rows >= 1 and tokens in 1..{self.replay.max_step_tokens}",
                got=f"{self.rows}, {self.tokens}",
            )  # fmt: skip
        if not 1 <= self.accepted <= self.tokens:
            raise ConfigError(
                "bench step", "forced_acceptance", expected=f"1..{self.tokens} tokens of a step", got=self.accepted
            )

    @property
    def conventional(self) -> bool:
        """Whether states are read and written at every token."""
        return self.cache == CONVENTIONAL


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of a measurement: `warm_up` untimed ones, `rounds` timed blocks of `block`, then one more block for the
    breakdown by kernels.
    """

    warm_up: int
    block: int
    rounds: int

    def __post_init__(self) -> None:
        require_positive("bench step", "rounds", self.rounds)

    @property
    def timed(self) -> int:
        """Timed steps."""
        return self.block * self.rounds

    def first_position(self, case: StepCase) -> int:
        """Where sequences begin, so that the middle of the timed steps lies at the case's context."""
        first = case.context - math.ceil(case.accepted * (self.warm_up + self.timed / 2))
        if first < 0:
            raise ConfigError(
                "bench step", "context", expected=f"at least {case.context - first} for {self.timed} timed steps",
                got=case.context, hint="Fewer rounds need less",
            )  # fmt: skip
        return first

    def last_position(self, case: StepCase) -> int:
        """Positions that sequences need at most."""
        steps = self.warm_up + self.timed + self.block
        return self.first_position(case) + math.ceil(case.accepted * steps) + case.tokens


def acceptance_table(mean: float, rows: int) -> list[list[int]]:
    """Committed tokens [steps][rows] with the given mean, spread evenly over the steps of a row and over the rows.

    The mean is taken to the nearest 1/100; the table repeats.
    """
    exact = Fraction(mean).limit_denominator(100)
    period = [math.floor((s + 1) * exact) - math.floor(s * exact) for s in range(exact.denominator)]
    return [[period[(step + row) % len(period)] for row in range(rows)] for step in range(len(period))]


def spread_records(replay: ReplayConfig, tokens: int, rows: int) -> list[int]:
    """Committed records of each row before the first step: rows stand at all places of their windows, as in serving."""
    places = replay.window - tokens + 1
    return [row % places for row in range(rows)]
