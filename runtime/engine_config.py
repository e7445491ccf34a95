"""The settings of an engine, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.runtime.planner import prompts_in_progress
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """max_batch_size: choices that hold a slot at once; max_num_tokens: tokens of one engine step.

    prefill_chunk: tokens of one prompt chunk, None: the whole budget. seed: for requests without one.
    conventional_state: the session reads and writes its state at every token; only the counters need to know.
    prefix: the prefix cache, None for none. max_preempted: choices in host memory at most for the sake of others with
    a higher priority, None: as many as max_batch_size.
    debug: check all bookkeeping after each step.
    """

    max_batch_size: int
    max_num_tokens: int
    prefill_chunk: int | None = None
    seed: int = 0
    conventional_state: bool = False
    prefix: PrefixConfig | None = None
    max_preempted: int | None = None
    debug: bool = False

    @property
    def max_unfinished(self) -> int:
        """Prompts in the middle at once, at most."""
        return prompts_in_progress(
            self.max_num_tokens, self.prefill_chunk, self.max_batch_size, reuse=self.prefix is not None
        )
