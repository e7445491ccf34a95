"""Output divergence by length (paper, Appendix E.4.3): each configuration against conventional float32 decoding.

All configurations consume the same tokens, so that only the recurrent state differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.runtime.evaluation.configurations import Configuration
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding, Model
from trtllm_replayssm.runtime.evaluation.journal import Journal
from trtllm_replayssm.runtime.evaluation.measures import extra_loss, kl_divergence, log_softmax, relative_state_error
from trtllm_replayssm.runtime.evaluation.reference import Plan, ReferenceFiles, usable_run, write_reference
from trtllm_replayssm.runtime.evaluation.saved_run import load_run

Progress = Callable[[str, int, int], None]
"""Called with (what is decoded, tokens done, tokens in all) after each step."""


def run_divergence(
    model: Model, plan: Plan, configurations: Sequence[Configuration], journal: Journal, files: ReferenceFiles,
    progress: Progress, *, keep_states: bool = True,
) -> None:  # fmt: skip
    """Measure what the journal does not hold yet, one configuration after the other.

    keep_states: save the states of every run after each length, so that one that was stopped, or is to go further,
    need not decode again what it has. Keys and values of long texts are gigabytes.
    """
    if not files.complete(plan.lengths):
        write_reference(
            model, plan, files, lambda done: progress("reference", done, plan.lengths[-1]), keep_states=keep_states
        )
    for configuration in configurations:
        missing = [n for n in plan.lengths if journal.find(configuration=configuration.name, length=n) is None]
        if missing:
            _measure(model, plan, configuration, journal, files, progress, missing, keep_states=keep_states)


def _measure(
    model: Model, plan: Plan, configuration: Configuration, journal: Journal, files: ReferenceFiles,
    progress: Progress, missing: Sequence[int], *, keep_states: bool,
) -> None:  # fmt: skip
    path = files.run.with_name(f"{configuration.name}.pt")
    saved = usable_run(load_run(path), plan, missing)
    # without random numbers the seeds of a text are one run
    streams, row_of = (plan.streams, None) if configuration.stochastic else (plan.texts, plan.text_of_row)
    text_of = plan.text_of_row if configuration.stochastic else list(range(len(streams)))
    run = ForcedDecoding(model, configuration.replay, streams, plan.prompt, saved=saved)
    done = run.position - plan.prompt
    recent: dict[int, Tensor] = {}  # position -> divergence and extra loss of each row, [2, rows]
    for length in [n for n in plan.lengths if done < n <= missing[-1]]:
        window = plan.positions(length)
        reference = torch.from_numpy(files.logprobs(length).copy()).to(model.device).transpose(0, 1)[text_of]
        while done < length:
            logits = run.step(length - done)
            tokens = logits.shape[1]
            first = max(0, window.start - done)  # of the step's tokens in the window
            if first < tokens:
                here = done + first - window.start
                measured = _measures(run, logits[:, first:], reference[:, here : here + tokens - first], tokens - first)
                recent |= {done + first + i: values for i, values in enumerate(measured)}
            done += tokens
            progress(configuration.name, done, missing[-1])
        if length in missing:
            exact = torch.from_numpy(files.states(length)).to(model.device)[:, text_of]
            error = relative_state_error(run.states(), exact)
            kl, loss = torch.stack([recent[p] for p in window]).mean(0)[:, row_of or slice(None)].cpu()
            journal.append(_row(configuration, length, kl, loss, error.cpu()))
            if keep_states:
                run.save(path)


def _measures(run: ForcedDecoding, logits: Tensor, reference: Tensor, tokens: int) -> Tensor:
    """Divergence and extra loss of the last `tokens` tokens a run has decoded, [tokens, 2, rows].

    logits, reference: [rows, tokens, V]. The loss is zero behind the last token of the texts.
    """
    ours = log_softmax(logits)
    following = run.steps.following(run.position - tokens, run.position)
    known = following.shape[1]
    loss = torch.zeros(ours.shape[:2], dtype=torch.float64, device=ours.device)
    loss[:, :known] = extra_loss(reference[:, :known], ours[:, :known], following)
    return torch.stack([kl_divergence(reference, ours), loss]).permute(2, 0, 1)


def _row(configuration: Configuration, length: int, kl: Tensor, loss: Tensor, error: Tensor) -> dict[str, Any]:
    """A journal line. A divergence that is not finite is null: the state overflowed."""
    by_head = error.mean(dim=1)
    return {
        "configuration": configuration.name,
        "formats": configuration.formats,
        "window": configuration.window,
        "length": length,
        "kl": _number(float(kl.mean())),
        "kl_by_row": [_number(v) for v in kl.tolist()],
        "extra_loss": _number(float(loss.mean())),
        "state_error_worst_head": _number(float(by_head.max())),
        "state_error": [[_number(v) for v in layer] for layer in by_head.tolist()],
    }


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
