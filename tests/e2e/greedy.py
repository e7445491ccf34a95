"""Greedy generation over a bare session: one request, drafts from the MTP head or none. For tests only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, MtpRow, PrefillChunk, Session


@dataclass
class GreedyRun:
    """ids: emitted tokens; margins: top-1 minus top-2 logit of each; accepted: tokens committed by each verify step."""

    ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prompt_logits: Logits | None = None
    first_drafts: list[Logits] = field(default_factory=list)

    def emit(self, logits: Logits) -> int:
        """Append the argmax of logits [V]."""
        top2 = np.partition(logits, -2)[-2:]
        self.ids.append(int(logits.argmax()))
        self.margins.append(float(top2[1] - top2[0]))
        return self.ids[-1]


def generate(session: Session, prompt: list[int], count: int, *, mtp_drafts: int = 0) -> GreedyRun:
    """Emit `count` tokens after `prompt`; with mtp_drafts > 0 each step verifies that many drafts."""
    run, slot = GreedyRun(), session.allocate(seed=1)
    logits = session.prefill([PrefillChunk(slot, prompt, True)])[0]
    assert logits is not None
    run.prompt_logits = logits
    base = run.emit(logits)
    drafts = _draft(session, run, slot, [*prompt[1:], base], mtp_drafts)
    while len(run.ids) < count:
        rows = session.decode([DecodeRow(slot, [base, *drafts])])[0]
        emitted = [run.emit(rows[0])]
        for draft, row in zip(drafts, rows[1:], strict=True):
            if emitted[-1] != draft or len(run.ids) == count:
                break
            emitted.append(run.emit(row))
        session.commit([len(emitted)])
        run.accepted.append(len(emitted))
        drafts = _draft(session, run, slot, emitted, mtp_drafts)
        base = emitted[-1]
    session.free(slot)
    return run


def _draft(session: Session, run: GreedyRun, slot: int, next_tokens: list[int], count: int) -> list[int]:
    if count == 0:
        return []
    logits = [session.mtp_begin([MtpRow(slot, next_tokens)])[0]]
    while len(logits) < count:
        logits.append(session.mtp_next([int(logits[-1].argmax())])[0])
    if not run.first_drafts:
        run.first_drafts = logits
    return [int(row.argmax()) for row in logits]
