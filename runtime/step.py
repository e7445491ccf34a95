"""One engine step over planned work: prompt chunks, decode rows, verify and commit, ends, forks, drafts.

Owns no queue and admits nobody; the engine plans, this runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.device_loop import DeviceLoop
from trtllm_replayssm.runtime.prefix.reuse import PrefixReuse
from trtllm_replayssm.runtime.sampling.distribution import NOT_A_NUMBER, Logits, broken
from trtllm_replayssm.runtime.scheduler.output import FinishReason
from trtllm_replayssm.runtime.scheduler.request import Choice, Request
from trtllm_replayssm.runtime.scheduler.scheduler import Chunk, Scheduler, StepPlan
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk, Session
from trtllm_replayssm.runtime.speculative.drafter import DraftContext, Drafter
from trtllm_replayssm.runtime.speculative.verify import VerifyContext, verify
from trtllm_replayssm.runtime.stats import EngineStats
from trtllm_replayssm.runtime.traffic_meter import TrafficMeter


@dataclass(frozen=True, slots=True)
class Progress:
    """A choice after its part of a step; next_tokens: what follows the positions that its slot just committed."""

    choice: Choice
    next_tokens: Sequence[int]


class SessionHead:
    """A session's multi-token-prediction head, as `MtpDrafter` drives it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def begin(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        """First draft logits [V] per (slot, tokens that follow its newly committed positions)."""
        return self._session.mtp_begin([MtpRow(slot, next_tokens) for slot, next_tokens in rows])

    def next(self, tokens: Sequence[int]) -> list[Logits]:
        """Next draft logits [V] per row of the last `begin`."""
        return self._session.mtp_next(tokens)


class StepRunner:
    """Runs planned steps over one session."""

    def __init__(
        self,
        session: Session,
        drafter: Drafter | None,
        scheduler: Scheduler,
        stats: EngineStats,
        meter: TrafficMeter,
        reuse: PrefixReuse | None = None,
        device: DeviceLoop | None = None,
    ) -> None:
        """reuse: where snapshots of prompts are offered; None for no prefix cache. device: runs one step ahead."""
        self._session = session
        self._reuse = reuse
        self._keeps_outputs = reuse is not None and reuse.config.outputs
        self._drafter = drafter
        self._scheduler = scheduler
        self._stats = stats
        self._meter = meter
        self._device = device
        self._settled: dict[int, Request] = {}  # requests that moved between two runs

    @property
    def has_news(self) -> bool:
        """Whether `run` would report something even with nothing planned."""
        return bool(self._settled)

    def run(self, plan: StepPlan) -> list[Request]:
        """Run the plan; returns the requests that moved since the last run, each once."""
        moved, self._settled = self._settled, {}
        if plan.chunks or plan.decode:
            self._stats.steps += 1
            ahead, here = self._parted(plan.decode)
            late = self._launch(ahead)  # first: the device works while the host does
            progress = [*self._prefill(plan.chunks), *self._decode(here)]
            self._draft([entry for entry in progress if self._goes_on(entry.choice)])
            moved |= self._close([*late, *(entry.choice for entry in progress)])
        return list(moved.values())

    def settle(self) -> None:
        """Take what the device has emitted, so that the host knows what every slot holds; `run` reports it."""
        if self._device is not None:
            self._settled |= self._close(self._device.drain())

    def unseat(self, choice: Choice) -> None:
        """A choice is about to lose its slot, and will go on; nothing is in flight."""
        if self._device is not None:
            self._device.leave(choice, keep_draft=True)

    def read_draft(self, choice: Choice) -> None:
        """Give a choice the drafts of its next step, wherever they are; nothing is in flight."""
        if self._device is not None:
            self._device.read_draft(choice)

    def _parted(self, choices: Sequence[Choice]) -> tuple[list[Choice], list[Choice]]:
        """Decoding choices: those of the device, and those of the host."""
        ahead: list[Choice] = []
        here: list[Choice] = []
        for choice in choices:
            (ahead if self._device is not None and self._device.takes(choice) else here).append(choice)
        return ahead, here

    def _launch(self, choices: Sequence[Choice]) -> list[Choice]:
        """Start a step of these choices on the device -> those to which the step before gave tokens."""
        return [] if self._device is None else self._device.advance(choices)

    def _close(self, moved: Sequence[Choice]) -> dict[int, Request]:
        """Offer what may be kept, free what has ended -> the requests that moved."""
        ended = [choice for choice in moved if choice.output.finish_reason is not None]
        if self._reuse is not None:
            for choice in moved:
                self._reuse.offer_prompt(choice)
            for choice in ended:
                self._reuse.offer_output(choice)
                if choice.output.error == NOT_A_NUMBER:
                    self._reuse.distrust(choice)
        for choice in ended:
            self.release(choice)
        return {choice.request.request_id: choice.request for choice in moved}

    def release(self, choice: Choice) -> None:
        """Give back what an ended choice holds."""
        if self._device is not None:
            self._device.leave(choice)
        if choice.slot is not None:
            self._session.free(choice.slot)
        if self._reuse is not None:
            self._reuse.end(choice)
        self._scheduler.finish(choice)

    def catch_up(self, choices: Sequence[Choice]) -> None:
        """Choices have begun at snapshots: pair each one's last position with the prompt token after it."""
        tails = [Progress(c, c.request.prompt_ids[c.prefilled : c.prefilled + 1]) for c in choices]
        self._draft(tails)

    def _goes_on(self, choice: Choice) -> bool:
        """Whether the drafter sees a choice: it runs on, or its state will be offered."""
        reason = choice.output.finish_reason
        kept = self._keeps_outputs and reason in (FinishReason.STOP, FinishReason.LENGTH)
        return choice.slot is not None and (reason is None or kept)

    def _prefill(self, chunks: Sequence[Chunk]) -> list[Progress]:
        if not chunks:
            return []
        rows = [PrefillChunk(chunk.choice.held, chunk.tokens, chunk.last) for chunk in chunks]
        progress = []
        results = self._session.prefill(rows)
        drawn = self._first_tokens(chunks, results)
        for chunk, logits in zip(chunks, results, strict=True):
            choice = chunk.choice
            prompt = choice.request.prompt_ids
            self._stats.prompt_tokens += len(chunk.tokens)
            choice.prefilled = chunk.end
            if not chunk.last:
                progress.append(Progress(choice, prompt[chunk.begin + 1 : chunk.end + 1]))
                continue
            assert logits is not None, "a session returns logits for every chunk marked last"
            for sibling in self._start_choices(choice, logits, drawn):
                first = sibling.output.token_ids[:1]
                progress.append(Progress(sibling, (*prompt[chunk.begin + 1 : chunk.end], *first)))
        return progress

    def _first_tokens(self, chunks: Sequence[Chunk], results: Sequence[Logits | None]) -> dict[Choice, int]:
        """First tokens that the device draws, of all prompts that have ended; the others' are the host's to draw."""
        if self._device is None:
            return {}
        ends = [(chunk.choice.request, row) for chunk, row in zip(chunks, results, strict=True) if row is not None]
        return self._device.first_tokens([(choice, row) for request, row in ends for choice in request.choices])

    def _start_choices(self, parent: Choice, logits: Logits, drawn: Mapping[Choice, int]) -> list[Choice]:
        """First token of each choice from the prompt's logits [V], or as drawn; those that go on get a copy of the
        slot."""
        slot = parent.held
        self._scheduler.prompt_done(parent)
        for choice in parent.request.choices:
            choice.prefilled = parent.prefilled
            self._emit(choice, logits[None], drawn.get(choice))
            if choice is not parent and choice.output.finish_reason is None:
                self._scheduler.place(choice, self._session.fork(slot, choice.seed))
        return parent.request.choices

    def _decode(self, choices: Sequence[Choice]) -> list[Progress]:
        if not choices:
            return []
        rows = [DecodeRow(choice.held, (choice.output.token_ids[-1], *choice.draft.tokens)) for choice in choices]
        accepted = []
        for choice, row, logits in zip(choices, rows, self._session.decode(rows), strict=True):
            emitted = self._emit(choice, logits)
            accepted.append(emitted)
            choice.pending = self._meter.decode_row(choice.pending, len(row.tokens), emitted)
        self._session.commit(accepted)
        return _tails(list(zip(choices, accepted, strict=True)))

    def _emit(self, choice: Choice, logits: Logits, drawn: int | None = None) -> int:
        """Verify one row's logits [n + 1, V]; returns how many tokens it emitted, 0 when the row is broken.

        A row that cannot be drawn from to its end ends its choice, after the tokens before that point. drawn: the one
        token of the row, where it is known.
        """
        if broken(logits):
            choice.output.finish(FinishReason.ERROR, NOT_A_NUMBER)
            return 0
        before = len(choice.output.token_ids)
        if drawn is None:
            self._verify(choice, logits)
        else:
            choice.take(drawn)
        emitted = len(choice.output.token_ids) - before
        self._stats.output_tokens += emitted
        if emitted:
            choice.request.times = choice.request.times.after_token()
        return emitted

    def _verify(self, choice: Choice, logits: Logits) -> None:
        context = VerifyContext(
            params=choice.request.params,
            history=choice.history,
            stop_ids=choice.request.stop_ids,
            seed=choice.seed,
            position=choice.position,
        )
        try:
            verify(logits, choice.draft, context, choice.output.push)
        except RequestError as error:
            choice.output.finish(FinishReason.ERROR, str(error))

    def _draft(self, progress: Sequence[Progress]) -> None:
        """Drafts for the next step; prompts with chunks to come, and ends that are kept, take part without drafts."""
        if self._drafter is None or not progress:
            return
        contexts = [self._context(entry, self._drafter.max_draft_len) for entry in progress]
        for entry, draft in zip(progress, self._drafter.propose(contexts), strict=True):
            entry.choice.draft = draft

    def _context(self, entry: Progress, longest: int) -> DraftContext:
        choice = entry.choice
        request = choice.request
        more_prompt = choice.prefilled < len(request.prompt_ids)
        idle = more_prompt or choice.output.finish_reason is not None
        # A row emits one token more than it drafts, so this also keeps every draft inside the sequence limit.
        room = 0 if idle else min(longest, choice.output.room - 1)
        return DraftContext(
            slot=choice.held,
            tokens=choice.tokens,
            next_tokens=entry.next_tokens,
            room=room,
            feed=more_prompt or self._keeps_outputs,
            params=request.params,
            history=choice.history,
            stop_ids=request.stop_ids,
            seed=choice.seed,
        )


def _tails(emitted: Sequence[tuple[Choice, int]]) -> list[Progress]:
    """Progress of (choice, tokens that it just emitted)."""
    return [Progress(c, c.output.token_ids[len(c.output.token_ids) - count :]) for c, count in emitted]
