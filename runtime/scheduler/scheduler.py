"""Continuous batching: who holds a slot, and what each engine step runs. Bookkeeping only; the engine runs it.

Rules: higher priority first; within one priority preempted choices resume before new ones start, and both first come,
first served; a request starts when slots for all of its choices are free, for which residents of a lower priority may
have to give up theirs; decode rows run in every step and prompt chunks share what is left of the token budget; no more
prompts than the limit stand unfinished between two steps.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from trtllm_replayssm.errors import ConfigError, InvariantError
from trtllm_replayssm.runtime.scheduler.request import Choice, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """max_batch_size: choices that hold a slot; max_num_tokens: tokens of one engine step; chunk: of one prompt chunk.

    max_step_tokens: tokens of one decode row, drafts included. block: prompt chunks end at multiples of it where they
    can, and at a choice's own cuts always. max_preempted: preempted choices beyond which none is preempted for others.
    max_unfinished: prompts that may hold a slot with some of their tokens absorbed and others not; each has states of
    its own, for which the memory plan has room.
    """

    max_batch_size: int
    max_num_tokens: int
    chunk: int
    max_step_tokens: int
    block: int = 1
    max_preempted: int = 1 << 30
    max_unfinished: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "chunk", "max_step_tokens", "block", "max_unfinished"):
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
        self._waiting: list[Choice] = []  # both sorted by falling priority
        self._preempted: list[Choice] = []
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

    @property
    def may_hold_unfinished(self) -> bool:
        """Whether one more prompt may stand in its middle: those that will have a place before it have one already."""
        long = sum(
            choice.state is RequestState.PREFILLING and choice.prefilled == 0
            and self._chunk_end(choice, self.config.max_num_tokens) < len(choice.request.prompt_ids)
            for choice in self._resident
        )  # fmt: skip
        return self._unfinished() + long < self.config.max_unfinished

    def _unfinished(self) -> int:
        return sum(choice.in_prompt for choice in self._resident)

    def add(self, choice: Choice) -> None:
        """Queue a new choice."""
        insort(self._waiting, choice, key=_rank)

    def resume(self, choice: Choice) -> None:
        """Queue a choice whose state is in host memory."""
        choice.slot = None
        choice.state = RequestState.PREEMPTED
        insort(self._preempted, choice, key=_rank)

    def next_admission(self, free_slots: int) -> Choice | None:
        """The choice that takes the next slot, or None; it stays queued until `place`."""
        first = self.head
        return first if first is not None and self._missing(first, self._resident, free_slots) <= 0 else None

    def victims(self, free_slots: int) -> list[Choice]:
        """Residents to preempt so that the next choice, of a higher priority, can start; empty when that is no help.

        The lowest priority goes first, and of equals the newest.
        """
        first = self.head
        if first is None:
            return []
        lower = [c for c in self._resident if c.request.priority < first.request.priority]
        lower.sort(key=lambda c: (c.request.priority, -c.request.request_id, -c.index))
        for count in range(1, min(len(lower), self.config.max_preempted - len(self._preempted)) + 1):
            gone = lower[:count]
            stay = [c for c in self._resident if c not in gone]
            if self._missing(first, stay, free_slots + count) <= 0:
                return gone
        return []

    @property
    def head(self) -> Choice | None:
        """The next in order, of equals the preempted one; None where it would be one unfinished prompt too many."""
        queues = [queue for queue in (self._preempted, self._waiting) if queue]
        first = min((queue[0] for queue in queues), key=_rank, default=None)
        return None if first is not None and first.in_prompt and not self.may_hold_unfinished else first

    def _missing(self, choice: Choice, resident: list[Choice], free_slots: int) -> int:
        """Slots that a choice lacks beside `resident`; at most 0 when it may start."""
        reserved = sum(other.width - 1 for other in resident)
        room = min(self.config.max_batch_size - len(resident), free_slots) - reserved
        return choice.width - room

    def place(self, choice: Choice, slot: int) -> None:
        """A choice has its slot: the first of its queue, or a new fork."""
        for queue in (self._preempted, self._waiting):
            if queue and queue[0] is choice:
                del queue[0]
        choice.slot = slot
        prompt_done = choice.prefilled == len(choice.request.prompt_ids)
        choice.state = RequestState.DECODING if prompt_done else RequestState.PREFILLING
        self._resident.append(choice)

    def plan(self) -> StepPlan:
        """All decode rows, and the oldest prompts' next chunks within the token budget.

        A prompt that has not begun and would not end waits where there are unfinished ones enough, and the likes of it
        behind it with it; the unfinished ones go on.
        """
        decode = [choice for choice in self._resident if choice.state is RequestState.DECODING]
        budget = self.config.max_num_tokens - sum(c.step_tokens for c in decode)
        chunks: list[Chunk] = []
        more, waits = self.config.max_unfinished - self._unfinished(), False
        for choice in self._resident:
            if choice.state is not RequestState.PREFILLING or budget <= 0:
                continue
            chunk = Chunk(choice, choice.prefilled, self._chunk_end(choice, budget))
            if chunk.begin == 0 and not chunk.last:
                waits = waits or more <= 0
                if waits:
                    continue
                more -= 1
            elif chunk.begin > 0 and chunk.last:
                more += 1
            chunks.append(chunk)
            budget -= chunk.end - chunk.begin
        return StepPlan(chunks, decode)

    def _chunk_end(self, choice: Choice, budget: int) -> int:
        begin, length = choice.prefilled, len(choice.request.prompt_ids)
        end = min(length, begin + min(self.config.chunk, budget))
        for cut in choice.cuts:
            if begin < cut < end:
                return cut
        aligned = end - end % self.config.block
        return aligned if begin < aligned and end < length else end

    def prompt_done(self, choice: Choice) -> None:
        """A resident's whole prompt has run."""
        choice.state = RequestState.DECODING

    def preempt(self, choice: Choice) -> None:
        """A resident gave up its slot and waits to resume."""
        self._resident.remove(choice)
        self.resume(choice)

    def finish(self, choice: Choice) -> None:
        """A choice ended, wherever it stood."""
        for queue in (self._waiting, self._preempted, self._resident):
            if choice in queue:
                queue.remove(choice)
        choice.slot = None
        choice.state = RequestState.FINISHED
        if choice.request.finished:
            choice.request.times = choice.request.times.after_end()

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


def _rank(choice: Choice) -> float:
    """Sorts queues: the highest priority first."""
    return -choice.request.priority
