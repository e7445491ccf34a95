"""Which greedy texts a CPU session allows: at every token its own choice, but for what bfloat16 leaves undecided.

A text is fed to the CPU session token by token, so that a token that fell the other way at a tie does not end the
comparison. The stated noise of a text is how far the other device's logits lie from the CPU's on the same text, fed in
steps of one token and of several; a token may lie below the CPU's best by twice that (each of the two logits may move).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

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
    return [a for a, b in zip_longest(ordered, ordered[1:]) if b is None or a[0] != b[0] or b[1][: len(a[1])] != a[1]]


def judge(texts: Sequence[Text], cpu: Session, device: Session) -> Verdict:
    """Compare with a session on the CPU; `device`: a session on the device that made the texts."""
    width = step_width(cpu, device)
    return verdict(texts, (want for part in groups(texts, cpu) for want in forced(cpu, part, width)), device)


def verdict(texts: Sequence[Text], wanted: Iterable[Logits | None], device: Session) -> Verdict:
    """wanted: the CPU's logits [n, V] of every text, in order; None: the text is its choice throughout. The device is
    asked about the other texts alone: only there is anything to excuse.
    """
    doubtful = []
    for text, want in zip(texts, wanted, strict=True):
        gaps = None if want is None else gaps_of(text, want)
        if want is not None and gaps is not None and gaps.any():
            doubtful.append((text, want, gaps))
    noise: list[float] = []
    for part in groups([text for text, _, _ in doubtful], device):
        wants = [want for _, want, _ in doubtful[len(noise) : len(noise) + len(part)]]
        sides = [forced(device, part, width) for width in {1, device.replay.max_step_tokens}]
        noise += [max(float(np.abs(want - other).max()) for other in got)
                  for want, *got in zip(wants, *sides, strict=True)]  # fmt: skip
    wrong = [(text, int(i), float(gaps[i]), most) for (text, _, gaps), most in zip(doubtful, noise, strict=True)
             for i in np.flatnonzero(gaps > 2 * most)]  # fmt: skip
    return Verdict(sum(len(text[1]) for text in texts), sum(int((gaps > 0).sum()) for _, _, gaps in doubtful), wrong)


def gaps_of(text: Text, want: Logits) -> Logits:
    """How far each token's logit lies below the best."""
    gaps: Logits = want.max(1) - want[np.arange(len(want)), text[1]]
    return gaps


def groups(texts: Sequence[Text], session: Session) -> Iterator[Sequence[Text]]:
    """As many at a time as the session has slots for."""
    size = session.free_slots
    return (texts[first : first + size] for first in range(0, len(texts), size))


def step_width(cpu: Session, device: Session) -> int:
    """The most tokens of a step that both sessions take."""
    return min(cpu.replay.max_step_tokens, device.replay.max_step_tokens)


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
