"""Continuous batching: who holds a slot, and what each engine step runs. Bookkeeping only; the engine runs it.

Rules: first come, first served; preempted choices resume before new ones start; a request starts when slots for all
of its choices are free; decode rows run in every step and prompt chunks share what is left of the token budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trtllm_replayssm.errors import ConfigError, InvariantError
from trtllm_replayssm.runtime.scheduler.request import Choice, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """max_batch_size: choices that hold a slot; max_num_tokens: tokens of one engine step; chunk: of one prompt chunk.

    max_step_tokens: tokens of one decode row, drafts included.
    """

    max_batch_size: int
    max_num_tokens: int
    chunk: int
    max_step_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "chunk", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError("SchedulerConfig", name, expected="a positive integer", got=getattr(self, name))
        if self.max_num_tokens < self.max_batch_size * self.max_step_tokens:
            raise ConfigError(
                "SchedulerConfig",
                "max_num_tokens",
                expected=f"at least max_batch_size * step tokens = {self.max_batch_size} * {self.max_step_tokens}",
                got=self.max_num_tokens,
                hint="Raise max_num_tokens, or lower max_batch_size or the draft length",
            )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens [begin, end) of a choice; last: the prompt ends here."""

    choice: Choice
    begin: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the prompt ends with this chunk."""
        return self.end == len(self.choice.request.prompt_ids)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The chunk's token ids."""
        return self.choice.request.prompt_ids[self.begin : self.end]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step runs."""

    chunks: list[Chunk] = field(default_factory=list)
    decode: list[Choice] = field(default_factory=list)


class Scheduler:
    """Queues and residents of one engine."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._waiting: deque[Choice] = deque()
        self._preempted: deque[Choice] = deque()
        self._resident: list[Choice] = []

    @property
    def has_work(self) -> bool:
        """Whether any choice has not finished."""
        return bool(self._waiting or self._preempted or self._resident)

    @property
    def resident(self) -> tuple[Choice, ...]:
        """Choices that hold a slot, oldest first."""
        return tuple(self._resident)

    @property
    def num_waiting(self) -> int:
        """Choices without a slot, new and preempted."""
        return len(self._waiting) + len(self._preempted)

    def add(self, choice: Choice) -> None:
        """Queue a new choice."""
        self._waiting.append(choice)

    def next_admission(self, free_slots: int) -> Choice | None:
        """The choice that takes the next slot, or None; it stays queued until `place`."""
        queue = self._preempted or self._waiting
        if not queue:
            return None
        reserved = sum(choice.width - 1 for choice in self._resident)
        taken = len(self._resident) + reserved
        width = queue[0].width
        if taken + width > self.config.max_batch_size or free_slots - reserved < width:
            return None
        return queue[0]

    def place(self, choice: Choice, slot: int) -> None:
        """A choice has its slot: the first of its queue, or a new fork."""
        for queue in (self._preempted, self._waiting):
            if queue and queue[0] is choice:
                queue.popleft()
        choice.slot = slot
        prompt_done = choice.prefilled == len(choice.request.prompt_ids)
        choice.state = RequestState.DECODING if prompt_done else RequestState.PREFILLING
        self._resident.append(choice)

    def plan(self) -> StepPlan:
        """All decode rows, and the oldest prompts' next chunks within the token budget."""
        decode = [choice for choice in self._resident if choice.state is RequestState.DECODING]
        budget = self.config.max_num_tokens - sum(1 + len(choice.draft) for choice in decode)
        chunks: list[Chunk] = []
        for choice in self._resident:
            if choice.state is not RequestState.PREFILLING or budget <= 0:
                continue
            left = len(choice.request.prompt_ids) - choice.prefilled
            count = min(left, self.config.chunk, budget)
            chunks.append(Chunk(choice, choice.prefilled, choice.prefilled + count))
            budget -= count
        return StepPlan(chunks, decode)

    def prompt_done(self, choice: Choice) -> None:
        """A resident's whole prompt has run."""
        choice.state = RequestState.DECODING

    def preempt(self, choice: Choice) -> None:
        """A resident gave up its slot and waits to resume."""
        self._resident.remove(choice)
        choice.slot = None
        choice.state = RequestState.PREEMPTED
        self._preempted.append(choice)

    def finish(self, choice: Choice) -> None:
        """A choice ended, wherever it stood."""
        for queue in (self._waiting, self._preempted, self._resident):
            if choice in queue:
                queue.remove(choice)
        choice.slot = None
        choice.state = RequestState.FINISHED
        if choice.request.finished:
            choice.request.times.finish()

    def check_integrity(self) -> None:
        """Raise InvariantError when two residents share a slot, or a choice is in a queue its state denies."""
        slots = [choice.slot for choice in self._resident]
        if None in slots or len(set(slots)) != len(slots):
            raise InvariantError("Scheduler", "resident", expected="one slot each", got=slots)
        held = (RequestState.PREFILLING, RequestState.DECODING)
        for queue, states in (
            (self._resident, held),
            (self._waiting, (RequestState.WAITING,)),
            (self._preempted, (RequestState.PREEMPTED,)),
        ):
            strays = [choice.state.value for choice in queue if choice.state not in states]
            if strays:
                raise InvariantError("Scheduler", "queues", expected=[s.value for s in states], got=strays)
        width = sum(choice.width for choice in self._resident)
        if width > self.config.max_batch_size:
            raise InvariantError(
                "Scheduler", "resident", expected=f"at most max_batch_size={self.config.max_batch_size}", got=width
            )
