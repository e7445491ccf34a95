"""What an engine has done: steps, tokens, acceptance, flushes, and recurrent-state traffic beside the conventional one.

The host knows each slot's h without reading the device back, because flush and commit follow the rules of
`spec.cursors`; traffic is then a function of the shape, see `spec.traffic`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from trtllm_replayssm.runtime.prefix.settings import PrefixStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine holds at one moment.

    running: choices that hold a slot, at most max_batch_size; waiting: choices without one. positions: committed
    prompt and output tokens of the running ones, at most positions_max over all slots. state_bytes: device memory that
    all slots' recurrent states, rings, windows and cursors were given; kv_bytes: that of keys and values.
    """

    running: int
    waiting: int
    max_batch_size: int
    slots: int
    free_slots: int
    positions: int
    positions_max: int
    state_bytes: int
    kv_bytes: int


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made.

    steps: engine steps that ran something. prompt_tokens, output_tokens: absorbed and emitted. decode_rows: rows of
    decode steps. drafted_tokens, accepted_tokens: drafts shown to the model and drafts that were emitted.
    acceptance: decode rows by the number of tokens they emitted. flushes: rows whose step folded its window.
    launches: steps of the device loop; late_launches: those that came when the one before had ended, so that the device
    waited for the host.
    state_bytes, conventional_bytes: recurrent-state traffic of the decode rows over all SSM layers, as kept here and
    as a kernel that reads and writes the state in each step would move it. prefix: of the prefix cache.
    """

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_rows: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    flushes: int = 0
    preemptions: int = 0
    launches: int = 0
    late_launches: int = 0
    state_bytes: int = 0
    conventional_bytes: int = 0
    acceptance: Counter[int] = field(default_factory=Counter)
    prefix: PrefixStats = field(default_factory=PrefixStats)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens emitted by a decode row; 0 before the first."""
        rows = sum(self.acceptance.values())
        return sum(length * count for length, count in self.acceptance.items()) / rows if rows else 0.0

    def as_dict(self) -> dict[str, object]:
        """The counters under their names, ready for JSON."""
        return {
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "decode_rows": self.decode_rows,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance": {str(length): count for length, count in sorted(self.acceptance.items())},
            "mean_acceptance_length": self.mean_acceptance_length,
            "flushes": self.flushes,
            "preemptions": self.preemptions,
            "launches": self.launches,
            "late_launches": self.late_launches,
            "state_bytes": self.state_bytes,
            "conventional_bytes": self.conventional_bytes,
            **self.prefix.as_dict(),
        }
