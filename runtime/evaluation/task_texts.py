"""Tasks that even a small model may do, generated: copying, recall of values by key, closing of brackets.

Each is a text and the answer that follows it; a model answers right where its most likely token is the answer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_WORDS = (
    "water house stone light hand king city river tree field bread night day sword table window garden horse road "
    "mountain letter number value file name word list string record handler server message system package command"
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Task:
    """text: what the model reads; answer: what must follow."""

    name: str
    text: str
    answer: str


def copying(rng: np.random.Generator) -> Task:
    """A list of words twice in full; its third round, behind the first two words, is the answer."""
    words = [str(w) for w in rng.choice(_WORDS.split(), size=8, replace=False)]
    line = ", ".join(words)
    return Task("copying", f"\n\n{line}.\n{line}.\n{', '.join(words[:2])}", ", " + ", ".join(words[2:]) + ".")


def recall(rng: np.random.Generator) -> Task:
    """Pairs of words, each stated twice; the value of one key is the answer."""
    words = [str(w) for w in rng.choice(_WORDS.split(), size=12, replace=False)]
    pairs = list(zip(words[:6], words[6:], strict=True))
    lines = [f"The {key} is the {value}." for key, value in pairs]
    again = [lines[i] for i in rng.permutation(6)]
    key, value = pairs[int(rng.integers(6))]
    return Task("recall", "\n\n" + "\n".join([*lines, *again]) + f"\nThe {key} is the", f" {value}.")


def brackets(rng: np.random.Generator) -> Task:
    """Nested brackets, each line opened and closed; the closing half of the last is the answer."""
    lines = []
    for _ in range(6):
        opened = [str(b) for b in rng.choice(list(_BRACKETS), size=3)]
        lines.append((" ".join(opened), " " + " ".join(_BRACKETS[b] for b in reversed(opened)) + "\n"))
    shown = "".join(first + second for first, second in lines[:-1])
    return Task("brackets", "\n\n" + shown + lines[-1][0], lines[-1][1])


TASKS: tuple[Callable[[np.random.Generator], Task], ...] = (copying, recall, brackets)


def make_tasks(examples: int, seed: int = 0) -> list[Task]:
    """`examples` of each kind, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return [make(rng) for make in TASKS for _ in range(examples)]
