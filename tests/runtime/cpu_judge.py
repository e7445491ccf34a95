"""Which greedy texts a CPU session allows: at every token its own choice, but for what bfloat16 leaves undecided.

A text is fed to the CPU session token by token, so that a token that fell the other way at a tie does not end the
comparison. The stated noise of a text is how far the other device's logits lie from the CPU's on the same text, fed in
steps of one token and of several; a token may lie below the CPU's best by twice that (each of the two logits may move).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, PrefillChunk, Session

Text = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and the tokens after it."""


@dataclass(frozen=True)
class Verdict:
    """Over all tokens of the texts: how many, how many are not the CPU's choice, those that noise does not explain."""

    tokens: int
    undecided: int
    wrong: list[tuple[Text, int, float, float]]  # text, place, gap in logits, noise


def longest(texts: Iterable[Text]) -> list[Text]:
    """Without those that another one begins with."""
    ordered = sorted({text for text in texts if text[1]})
    following = [*ordered[1:], ((), ())]
    return [a for a, b in zip(ordered, following, strict=True) if a[0] != b[0] or b[1][: len(a[1])] != a[1]]


def judge(texts: Sequence[Text], cpu: Session, device: Session) -> Verdict:
    """Compare with a session on the CPU; `device`: a session on the device that made the texts."""
    widest = min(cpu.replay.max_step_tokens, device.replay.max_step_tokens)
    count, undecided, wrong = 0, 0, []
    group = min(cpu.free_slots, device.free_slots)
    for first in range(0, len(texts), group):
        part = texts[first : first + group]
        sides = [forced(cpu, part, widest), *(forced(device, part, width) for width in {1, widest})]
        for text, want, *got in zip(part, *sides, strict=True):
            noise = max(float(np.abs(want - other).max()) for other in got)
            gaps = want.max(1) - want[np.arange(len(want)), text[1]]
            count, undecided = count + len(gaps), undecided + int((gaps > 0).sum())
            wrong += [(text, int(i), float(gaps[i]), noise) for i in np.flatnonzero(gaps > 2 * noise)]
    return Verdict(count, undecided, wrong)


def forced(session: Session, texts: Sequence[Text], width: int) -> Iterator[Logits]:
    """Logits [n, V] before each of the n tokens of every text, fed `width` at a time, all texts in one batch."""
    slots = [session.allocate(seed=1) for _ in texts]
    found: list[list[Logits]] = [[] for _ in texts]
    for place, (slot, (prompt, _)) in enumerate(zip(slots, texts, strict=True)):
        [logits] = session.prefill([PrefillChunk(slot, prompt, True)])
        assert logits is not None
        found[place].append(logits[None])
    for at in range(0, max(len(tokens) for _, tokens in texts) - 1, width):
        parts = [tokens[at : min(at + width, len(tokens) - 1)] for _, tokens in texts]
        places = [i for i, part in enumerate(parts) if part]
        rows = session.decode([DecodeRow(slots[i], parts[i]) for i in places])
        session.commit([len(parts[i]) for i in places])
        for i, logits in zip(places, rows, strict=True):
            found[i].append(np.asarray(logits))
    for slot in slots:
        session.free(slot)
    return (np.concatenate(parts) for parts in found)
