"""The engine: where scheduler, session, drafter and sampling are joined. Not thread-safe; one thread owns it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from trtllm_replayssm.errors import CapacityError, RequestError
from trtllm_replayssm.runtime.device_loop import DeviceLoop, Steps
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.fit import require_session_fit, session_slot_bytes
from trtllm_replayssm.runtime.intake import Intake
from trtllm_replayssm.runtime.outputs import RequestOutput, request_output
from trtllm_replayssm.runtime.prefix.reuse import PrefixReuse
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.output import FinishReason
from trtllm_replayssm.runtime.scheduler.request import DEFAULT_PRIORITY, Choice, Request, RequestState
from trtllm_replayssm.runtime.scheduler.scheduler import Scheduler, SchedulerConfig
from trtllm_replayssm.runtime.session.base import Session, SlotSnapshot
from trtllm_replayssm.runtime.speculative.drafter import Drafter
from trtllm_replayssm.runtime.stats import EngineLoad, EngineStats
from trtllm_replayssm.runtime.step import StepRunner
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer
from trtllm_replayssm.runtime.traffic_meter import TrafficMeter
from trtllm_replayssm.runtime.transfer.request_file import read_request, write_request
from trtllm_replayssm.runtime.transfer.restore import Fit


class Engine:
    """Runs requests over one session."""

    def __init__(
        self, session: Session, drafter: Drafter | None, tokenizer: Tokenizer | None, config: EngineConfig,
        steps: Steps | None = None,
    ) -> None:  # fmt: skip
        """drafter: None for plain decoding. steps: decode rows run there, one step ahead, when they do not need the
        host; drafts of theirs are its own. Raises ConfigError when batch, slots or draft length do not fit.
        """
        step_tokens = 1 + (drafter.max_draft_len if drafter is not None else 0)
        require_session_fit(session, config.max_batch_size, step_tokens)
        self._max_drafts = step_tokens - 1
        self.session = session
        self.config = config
        self.stats = EngineStats()
        self.intake = Intake(
            vocab=session.geometry.vocab,
            max_seq_len=session.pool.max_seq_len,
            max_choices=config.max_batch_size,
            end_ids=session.geometry.eos_ids,
            tokenizer=tokenizer,
            seed=config.seed,
        )
        size = session_slot_bytes(session, conventional=config.conventional_state)
        self._state_bytes, self._kv_bytes = session.pool.slots * (size.total - size.kv), session.pool.slots * size.kv
        self._requests: dict[int, Request] = {}
        self._snapshots: dict[Choice, SlotSnapshot] = {}
        self._numbering = threading.Lock()
        self._serial = 0
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_batch_size=config.max_batch_size,
                max_num_tokens=config.max_num_tokens,
                chunk=config.prefill_chunk or config.max_num_tokens,
                max_step_tokens=step_tokens,
                block=1 if config.prefix is None else config.prefix.block,
                max_preempted=config.max_batch_size if config.max_preempted is None else config.max_preempted,
                max_unfinished=config.max_unfinished,
            )
        )
        self.prefix = None if config.prefix is None else PrefixReuse(session, config.prefix, self.stats.prefix)
        meter = TrafficMeter(
            session.geometry,
            session.replay,
            session.pool.activation,
            self.stats,
            conventional=config.conventional_state,
        )
        self._steps = steps
        keeps_ends = config.prefix is not None and config.prefix.outputs
        device = None if steps is None else DeviceLoop(steps, self.stats, meter, keeps_ends=keeps_ends)
        self._runner = StepRunner(session, drafter, self._scheduler, self.stats, meter, self.prefix, device)

    def warm_up(self) -> None:
        """Make now what the first steps would otherwise make. Before any request."""
        self.session.warm_up()
        if self._steps is not None:
            self._steps.warm_up()

    def close(self) -> None:
        """End what the session has outside this process. Nothing may be asked of it after that."""
        self.session.close()

    @property
    def has_work(self) -> bool:
        """Whether a step would run or report anything."""
        return self._scheduler.has_work or self._runner.has_news

    def load(self) -> EngineLoad:
        """Slots, queue and positions now. May be called from any thread; then it may be a step behind."""
        pool, resident = self.session.pool, self._scheduler.resident
        return EngineLoad(
            running=len(resident),
            waiting=self._scheduler.num_waiting,
            max_batch_size=self.config.max_batch_size,
            slots=pool.slots,
            free_slots=self.session.free_slots,
            positions=sum(choice.prefilled + len(choice.output.token_ids) for choice in resident),
            positions_max=pool.slots * pool.max_seq_len,
            state_bytes=self._state_bytes,
            kv_bytes=self._kv_bytes,
        )

    def make_request(
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: float = DEFAULT_PRIORITY
    ) -> Request:
        """A checked request that is not queued yet. Raises RequestError. May be called from any thread."""
        with self._numbering:
            request = self.intake.request(self._serial, prompt, params, priority=priority)
            self._serial += 1
        return request

    def enqueue(self, request: Request) -> None:
        """Queue a request of `make_request`."""
        self._requests[request.request_id] = request
        self._scheduler.add(request.choices[0])

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: float = DEFAULT_PRIORITY
    ) -> int:
        """Queue a prompt; returns the request's number. Raises RequestError; other requests are not touched.

        priority: 0..1. When no slot is free, one with a higher priority moves others' slots to host memory; they
        resume, with the same tokens, when there is room.
        """
        request = self.make_request(prompt, params, priority=priority)
        self.enqueue(request)
        return request.request_id

    def cancel(self, request_id: int) -> RequestOutput | None:
        """End a request now and free its slots; its last output, or None when it has ended already."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        for choice in request.choices:
            if choice.state is not RequestState.FINISHED:
                choice.output.finish(FinishReason.CANCELLED)
                self._snapshots.pop(choice, None)
                self._runner.release(choice)
        output = request_output(request)
        request.let_go()
        return output

    def output_of(self, request_id: int) -> RequestOutput | None:
        """The output so far of a request that is here, None when it has ended."""
        request = self._requests.get(request_id)
        return None if request is None else request_output(request)

    def preempt(self, request_id: int) -> None:
        """Move a request's slots to host memory; it resumes when slots are free, before new ones of its priority."""
        request = self._requests.get(request_id)
        for choice in request.choices if request is not None else ():
            self._to_host(choice)

    def _to_host(self, choice: Choice) -> None:
        self._runner.settle()
        if choice.slot is None:
            return
        self._runner.unseat(choice)
        self._snapshots[choice] = self.session.save(choice.slot)
        self.session.free(choice.slot)
        self._scheduler.preempt(choice)
        self.stats.preemptions += 1

    def export_request(self, request_id: int, path: str | Path) -> None:
        """Write a request with its slots' states to a file, from which `import_request` goes on; it goes on here too.

        Raises RequestError for one that is not here, UnsupportedError for one that follows a grammar, OSError.
        """
        self._runner.settle()
        request = self._requests.get(request_id)
        if request is None or request.finished:
            raise RequestError("export_request", "request_id", expected="a request that has not ended", got=request_id)
        for choice in request.choices:
            self._runner.read_draft(choice)
        snapshots = {c.index: self.session.save(c.slot) for c in request.choices if c.slot is not None}
        snapshots |= {c.index: self._snapshots[c] for c in request.choices if c in self._snapshots}
        write_request(path, request, snapshots, self.session.signature)

    def import_request(self, path: str | Path) -> int:
        """Go on with a request of `export_request`, under a new number, which is returned; its tokens are the same.

        The file is not trusted: settings pass the checks of a new request, and progress must follow from the tokens.
        Its states, which cannot be held against its tokens, serve no other request (prefix cache).
        Raises CheckpointError for a missing, damaged or inconsistent file, EngineMismatchError for one of another
        engine; nothing is queued then.
        """
        with self._numbering:
            request_id, self._serial = self._serial, self._serial + 1
        fit = Fit(checks=self.intake, window=self.session.replay.window, max_drafts=self._max_drafts)
        saved = read_request(path, request_id, self.session, fit)
        self._requests[request_id] = saved.request
        for choice in saved.request.choices:
            if choice.index in saved.snapshots:
                self._snapshots[choice] = saved.snapshots[choice.index]
                self._scheduler.resume(choice)
        if not saved.snapshots:
            self._scheduler.add(saved.request.choices[0])
        return request_id

    def step(self) -> list[Request]:
        """Run one step; returns the requests that got tokens or ended. Finished ones are forgotten by the engine."""
        self._admit()
        moved = self._runner.run(self._scheduler.plan())
        changed = [request for request in moved if request.request_id in self._requests]  # not cancelled since
        for request in changed:
            if request.finished:
                del self._requests[request.request_id]
        if self.config.debug:
            self.check_integrity()
        return changed

    def _admit(self) -> None:
        """Give slots to queued choices, in order. A session that is full after all leaves them queued."""
        begun: list[Choice] = []
        while (choice := self._next()) is not None:
            new = choice not in self._snapshots
            try:
                slot = self._seat(choice)
            except CapacityError:
                if not self._scheduler.resident:
                    raise  # nothing of ours will ever free a slot
                break
            self._scheduler.place(choice, slot)
            choice.request.times = choice.request.times.after_admission()
            if new and choice.prefilled:
                begun.append(choice)
        self._runner.catch_up(begun)

    def _next(self) -> Choice | None:
        """The choice that can have a slot now, if others of a lower priority must go for it."""
        head = self._scheduler.head
        if head is None or self._waits(head):
            return None
        choice = self._scheduler.next_admission(self.session.free_slots)
        if choice is None:
            victims = self._scheduler.victims(self.session.free_slots)
            for victim in victims:
                self._to_host(victim)
            if victims:
                choice = self._scheduler.next_admission(self.session.free_slots)
        return choice

    def _waits(self, choice: Choice) -> bool:
        """Whether a new prompt would begin in its middle while there are unfinished ones enough."""
        if self.prefix is None or choice in self._snapshots or self._scheduler.may_hold_unfinished:
            return False
        return self.prefix.knows(choice)

    def _seat(self, choice: Choice) -> int:
        """A slot: with the state that the choice gave up, or for a new prompt. Raises CapacityError."""
        snapshot = self._snapshots.get(choice)
        if snapshot is not None:
            slot = self.session.restore(snapshot, seed=choice.seed)
            del self._snapshots[choice]
            return slot
        return self.session.allocate(choice.seed) if self.prefix is None else self.prefix.begin(choice)

    def check_integrity(self) -> None:
        """Raise InvariantError when the scheduler's or the session's bookkeeping is inconsistent."""
        self._scheduler.check_integrity()
        self.session.check_integrity()
        if self.prefix is not None:
            self.prefix.cache.check_integrity()
