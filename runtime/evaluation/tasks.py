"""Accuracy on generated tasks behind decoded text of some length, each configuration paired with a float32 state.

The text is decoded once; every example continues from a copy of its state, so that the length of the decoding that
built the state is what varies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trtllm_replayssm.runtime.evaluation.configurations import Configuration
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding, Model
from trtllm_replayssm.runtime.evaluation.streams import Stream
from trtllm_replayssm.runtime.evaluation.task_texts import make_tasks
from trtllm_replayssm.runtime.session.base import DecodeRow
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer

PAIRED = Configuration(formats="shared-fp32", window=16, step_tokens=16)
Answers = dict[tuple[int, str], list[bool]]
"""(length, task) -> for each token of all its answers, whether the model's most likely token was it."""


def run_task_grid(
    model: Model, tokenizer: Tokenizer, streams: Sequence[Stream], configurations: Sequence[Configuration],
    lengths: Sequence[int], progress: Callable[[str, int, int], None], *, prompt: int, examples: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each task, length and configuration: accuracy, that of float32, and tokens won and lost against it."""
    encoded = []
    for task in make_tasks(examples):
        text = tokenizer.encode(task.text, add_special_tokens=False)
        # the answer as it is tokenised behind its text
        whole = tokenizer.encode(task.text + task.answer, add_special_tokens=False)
        shared = next((i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), len(text))
        encoded.append((task.name, list(whole), shared))

    def answers(configuration: Configuration) -> Answers:
        return _answers(model, configuration, streams, encoded, sorted(lengths), prompt, progress)

    reference, rows = answers(PAIRED), []
    for configuration in configurations:
        found = reference if configuration == PAIRED else answers(configuration)
        for (length, name), right in found.items():
            paired = np.array(reference[length, name])
            ours = np.array(right)
            rows.append(
                {
                    "task": name, "length": length, "configuration": configuration.name, "tokens": len(right),
                    "accuracy": round(float(ours.mean()), 4), "fp32": round(float(paired.mean()), 4),
                    "won": int((ours & ~paired).sum()), "lost": int((~ours & paired).sum()),
                }
            )  # fmt: skip
    return rows


def _answers(
    model: Model, configuration: Configuration, streams: Sequence[Stream], encoded: list[tuple[str, list[int], int]],
    lengths: Sequence[int], prompt: int, progress: Callable[[str, int, int], None],
) -> Answers:  # fmt: skip
    longest = max(len(ids) for _, ids, _ in encoded)
    run = ForcedDecoding(
        model, configuration.replay, streams, prompt, spare_slots=len(encoded), spare_tokens=longest
    )  # fmt: skip
    found: Answers = {}
    for length in lengths:
        while run.position < prompt + length:
            run.step(prompt + length - run.position)
            progress(configuration.name, run.position - prompt, lengths[-1])
        for (name, _, _), right in zip(encoded, _continue(run, encoded), strict=True):
            found.setdefault((length, name), []).extend(right)
    return found


def _continue(run: ForcedDecoding, encoded: list[tuple[str, list[int], int]]) -> list[list[bool]]:
    """Decode every example from a copy of a stream's state -> which tokens of its answer were the most likely."""
    session = run.session
    seeds = [s.seed for s in run.streams]
    slots = [session.fork(run.slots[i % len(run.slots)], seeds[i % len(seeds)]) for i in range(len(encoded))]
    rounding, records = run.rounding_of(slots), run.records
    right: list[list[bool]] = [[] for _ in encoded]
    for place in range(max(len(ids) for _, ids, _ in encoded) - 1):
        live = [i for i, (_, ids, _) in enumerate(encoded) if place < len(ids) - 1]
        logits = session.decode([DecodeRow(slots[i], [encoded[i][1][place]]) for i in live])
        session.commit([1] * len(live))
        flush = run.flushes_next(records)
        if flush and rounding is not None:  # of examples that have ended too, which nobody reads again
            rounding.apply(torch.full((len(slots),), run.position + place, device=run.device))
        records = 1 if flush else records + 1
        for i, row in zip(live, logits, strict=True):
            if place + 1 >= encoded[i][2]:
                right[i].append(int(row[0].argmax()) == encoded[i][1][place + 1])
    for slot in slots:
        session.free(slot)
    return right
