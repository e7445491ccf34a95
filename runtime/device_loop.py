"""Decode rows that run on the device one step ahead of the host: who is there, what was launched, what came back.

A launch runs over the requests of one engine step; its tokens are taken in the next one, when the launch behind it is
already under way. A request that ends on the device (a stop token, the length) does nothing in that later launch; what
one that ends on the host (a stop string, a cancellation) still emits there is dropped. Either way its slot may be
given back at once: whatever comes next into it is queued behind that launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import InvariantError
from trtllm_replayssm.runtime.device.entry import (
    DeviceEntry,
    RowReport,
    SamplingMode,
    device_eligible,
    sampling_mode,
)
from trtllm_replayssm.runtime.sampling.distribution import NOT_A_NUMBER, Logits
from trtllm_replayssm.runtime.scheduler.output import FinishReason
from trtllm_replayssm.runtime.scheduler.request import Choice, Request
from trtllm_replayssm.runtime.speculative.drafter import NO_DRAFT, Draft
from trtllm_replayssm.runtime.stats import EngineStats
from trtllm_replayssm.runtime.traffic_meter import TrafficMeter


class Steps(Protocol):
    """What runs the steps: `device.steps.DeviceSteps`."""

    @property
    def max_draft_len(self) -> int:
        """Drafts per request and step at most."""
        ...

    def warm_up(self) -> None:
        """Make everything that a launch needs."""
        ...

    def enter(self, entries: Sequence[DeviceEntry]) -> None:
        """Requests begin to decode on the device."""
        ...

    def draw(self, entries: Sequence[DeviceEntry], logits: Sequence[Logits], mode: SamplingMode) -> list[int]:
        """A token for each request, from logits [V] on the host."""
        ...

    def launch(self, slots: Sequence[int], mode: SamplingMode) -> bool:
        """Run one step of these slots without waiting for it -> whether the device was waiting for it."""
        ...

    def read(self) -> list[RowReport]:
        """What the oldest unread launch emitted."""
        ...

    def drafts(self, slot: int) -> tuple[tuple[int, ...], NDArray[np.float64] | None]:
        """The drafts of the slot's next step, and what a sampled request's were drawn from (None: not drawn)."""
        ...


class DeviceLoop:
    """The choices of one engine that decode on the device."""

    def __init__(self, steps: Steps, stats: EngineStats, meter: TrafficMeter, *, keeps_ends: bool) -> None:
        """keeps_ends: states at the end of answers are kept."""
        self._steps = steps
        self._stats = stats
        self._meter = meter
        self._keeps_ends = keeps_ends
        self._present: dict[Choice, SamplingMode] = {}  # what each needs
        self._flight: list[Choice] = []  # the choices of the launch that nobody has read yet

    def takes(self, choice: Choice) -> bool:
        """Whether a decoding choice belongs here."""
        if choice in self._present:
            return True
        params = choice.request.params
        return device_eligible(params, len(_stop_ids(choice.request)), exact_end=self._keeps_ends)

    def advance(self, choices: Sequence[Choice]) -> list[Choice]:
        """Launch a step of these choices, then take what the launch before it emitted -> the choices that got it."""
        fresh = [choice for choice in choices if choice not in self._present]
        self._steps.enter([self._entry(choice, choice.held, choice.draft) for choice in fresh])
        for choice in fresh:
            choice.move_away(self._steps.max_draft_len)
            self._present[choice] = sampling_mode(choice.request.params)
        flown = self._flight
        # every row in flight emits a token, so one with room for a single token ends there
        last = {choice for choice in flown if choice.output.room <= 1}
        self._flight = [choice for choice in choices if choice not in last]
        if self._flight:
            mode = max([self._present[choice] for choice in self._flight])
            late = self._steps.launch([choice.held for choice in self._flight], mode)
            self._stats.launches += 1
            self._stats.late_launches += late
        return self._taken(flown)

    def first_tokens(self, starts: Sequence[tuple[Choice, Logits]]) -> dict[Choice, int]:
        """The first tokens of the sampled choices that belong here, from their prompts' logits [V]."""
        drawn = [(c, logits) for c, logits in starts if self.takes(c) and not c.request.params.greedy]
        if not drawn:
            return {}
        entries = [self._entry(choice, i, NO_DRAFT) for i, (choice, _) in enumerate(drawn)]
        mode = max(sampling_mode(choice.request.params) for choice, _ in drawn)
        tokens = self._steps.draw(entries, [logits for _, logits in drawn], mode)
        return {choice: token for (choice, _), token in zip(drawn, tokens, strict=True)}

    def drain(self) -> list[Choice]:
        """Take what is in flight and launch nothing: the host then knows what the slots hold."""
        flown, self._flight = self._flight, []
        return self._taken(flown)

    def leave(self, choice: Choice, *, keep_draft: bool = False) -> None:
        """A choice gives up its place. keep_draft: it goes on elsewhere, with the drafts of its next step."""
        if choice not in self._present:
            return
        if keep_draft:
            self.read_draft(choice)
        del self._present[choice]
        choice.move_back()

    def read_draft(self, choice: Choice) -> None:
        """Give a choice that is here, with nothing in flight, the drafts of its next step; waits for the device."""
        if choice in self._present:
            tokens, q = self._steps.drafts(choice.held)
            choice.draft = Draft(tokens, None if choice.request.params.greedy else q)

    def _taken(self, flown: Sequence[Choice]) -> list[Choice]:
        if not flown:
            return []
        taken = []
        for choice, report in zip(flown, self._steps.read(), strict=True):
            if choice.output.finish_reason is None:
                self._take(choice, report)
                taken.append(choice)
        return taken

    def _take(self, choice: Choice, report: RowReport) -> None:
        if report.num_tokens == 0:
            where = f"request {choice.request.request_id}"
            raise InvariantError("DeviceLoop", where, expected="tokens of a choice that goes on", got="none")
        emitted = 0
        for token in report.tokens:
            emitted += 1
            if choice.take(token):
                break
        if emitted:
            choice.request.times = choice.request.times.after_token()
        if report.broken:
            choice.output.finish(FinishReason.ERROR, NOT_A_NUMBER)
        choice.pending = self._meter.decode_row(choice.pending, report.num_tokens, emitted)
        self._stats.output_tokens += emitted

    def _entry(self, choice: Choice, slot: int, draft: Draft) -> DeviceEntry:
        params = choice.request.params
        return DeviceEntry(
            slot=slot,
            tokens=choice.tokens,
            room=choice.output.room,
            stop_ids=sorted(_stop_ids(choice.request)),
            seed=choice.seed,
            drafts=draft.tokens,
            q=draft.q,
            greedy=params.greedy,
            temperature=1.0 if params.temperature is None else params.temperature,
            top_k=params.top_k or 0,
            top_p=1.0 if params.top_p is None else params.top_p,
            min_p=params.min_p or 0.0,
        )


def _stop_ids(request: Request) -> frozenset[int]:
    """Every token that ends the request's choices."""
    rules = request.rules
    return rules.stop_ids if request.params.ignore_eos else rules.stop_ids | rules.end_ids
