"""Output divergence by length (paper, Appendix E.4.3): each configuration against conventional float32 decoding.

All configurations consume the same tokens, so that only the recurrent state differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.runtime.evaluation.configurations import Configuration
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding, Model
from trtllm_replayssm.runtime.evaluation.journal import Journal
from trtllm_replayssm.runtime.evaluation.measures import kl_divergence, log_softmax, relative_state_error
from trtllm_replayssm.runtime.evaluation.reference import Plan, ReferenceFiles, usable_run, write_reference
from trtllm_replayssm.runtime.evaluation.saved_run import load_run

Progress = Callable[[str, int, int], None]
"""Called with (what is decoded, tokens done, tokens in all) after each step."""


def run_divergence(
    model: Model, plan: Plan, configurations: Sequence[Configuration], journal: Journal, files: ReferenceFiles,
    progress: Progress,
) -> None:  # fmt: skip
    """Measure what the journal does not hold yet, one configuration after the other."""
    if not files.complete(plan.lengths):
        write_reference(model, plan, files, lambda done: progress("reference", done, plan.lengths[-1]))
    for configuration in configurations:
        missing = [n for n in plan.lengths if journal.find(configuration=configuration.name, length=n) is None]
        if missing:
            _measure(model, plan, configuration, journal, files, progress, missing)


def _measure(
    model: Model, plan: Plan, configuration: Configuration, journal: Journal, files: ReferenceFiles,
    progress: Progress, missing: Sequence[int],
) -> None:  # fmt: skip
    path = files.run.with_name(f"{configuration.name}.pt")
    saved = usable_run(load_run(path), plan, missing)
    run = ForcedDecoding(model, configuration.replay, plan.streams, plan.prompt, saved=saved)
    done = run.position - plan.prompt
    recent: dict[int, NDArray[np.float64]] = {}  # position -> divergence of each row
    losses: dict[int, NDArray[np.float64]] = {}
    for length in [n for n in plan.lengths if done < n <= missing[-1]]:
        window = plan.positions(length)
        reference = files.logprobs(length)
        while done < length:
            logits = run.step(length - done)
            tokens = len(logits[0])
            for t in range(tokens):
                if done + t in window:
                    ours = log_softmax(np.stack([row[t] for row in logits]))
                    recent[done + t] = kl_divergence(reference[done + t - window.start], ours)
                    losses[done + t] = _extra_loss(plan, done + t, ours, reference[done + t - window.start])
            done += tokens
            progress(configuration.name, done, missing[-1])
        if length in missing:
            error = relative_state_error(run.states(), files.states(length))
            mean = [np.mean([values[p] for p in window], axis=0) for values in (recent, losses)]
            journal.append(_row(configuration, length, mean[0], mean[1], error))
            run.save(path)


def _extra_loss(
    plan: Plan, position: int, ours: NDArray[np.float64], reference: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Loss of the text's next token above the reference's, nats, [rows]; zero behind the last token of a stream."""
    following = plan.prompt + position + 1
    extra = np.zeros(len(plan.streams))
    for i, stream in enumerate(plan.streams):
        if following < len(stream.ids):
            token = stream.ids[following]
            extra[i] = float(reference[i, token]) - ours[i, token]
    return extra


def _row(
    configuration: Configuration, length: int, kl: NDArray[np.float64], loss: NDArray[np.float64],
    error: NDArray[np.float64],
) -> dict[str, Any]:  # fmt: skip
    """A journal line. A divergence that is not finite is null: the state overflowed."""
    by_head = error.mean(axis=1)
    return {
        "configuration": configuration.name,
        "formats": configuration.formats,
        "window": configuration.window,
        "length": length,
        "kl": _number(kl.mean()),
        "kl_by_row": [_number(v) for v in kl],
        "extra_loss": _number(loss.mean()),
        "state_error_worst_head": _number(by_head.max()),
        "state_error": [[_number(v) for v in layer] for layer in by_head],
    }


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if np.isfinite(value) else None
