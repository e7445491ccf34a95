"""Cursors of one slot, shared by all layers, and the rules that move them (paper, Appendix D.1)."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.config import ReplayConfig


@dataclass(slots=True)
class Cursors:
    """origin: ring row of the oldest committed record; h: committed records; position: committed tokens; seed: key."""

    origin: int = 0
    h: int = 0
    position: int = 0
    seed: int = 0

    def row(self, config: ReplayConfig, index: int) -> int:
        """Ring row of the record `index` places after the oldest committed one."""
        return (self.origin + index) % config.ring_rows


def flushes(config: ReplayConfig, h: int, num_tokens: int) -> bool:
    """Whether a step of num_tokens with h committed records folds them first; known before the step runs."""
    return h + num_tokens > config.window


def commit(config: ReplayConfig, cursors: Cursors, num_tokens: int, accepted: int) -> None:
    """Commit `accepted` of the step's num_tokens (clamped to 0..num_tokens); a flushed window is dropped first."""
    accepted = min(max(accepted, 0), num_tokens)
    if flushes(config, cursors.h, num_tokens):
        cursors.origin = (cursors.origin + cursors.h) % config.ring_rows
        cursors.h = 0
    cursors.h += accepted
    cursors.position += accepted


def finish_prefill(cursors: Cursors, num_tokens: int) -> None:
    """After a prompt chunk of num_tokens: pending records were folded by it, so the ring is empty again."""
    cursors.origin = 0
    cursors.h = 0
    cursors.position += num_tokens
