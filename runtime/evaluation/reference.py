"""The reference of an evaluation on disk: log-probabilities of the measured positions only, and states, by length.

One file holds [positions, texts, V] float32 of the window that ends at a length, so that no run keeps more than the
window it is in, and every configuration can be measured against it in a process of its own. The seeds of a text share
its reference, which draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding, Model
from trtllm_replayssm.runtime.evaluation.measures import log_softmax
from trtllm_replayssm.runtime.evaluation.saved_run import SavedRun, load_run
from trtllm_replayssm.runtime.evaluation.streams import Stream
from trtllm_replayssm.whole_file import whole_file

POSITIONS = 256  # measured positions at each length (paper, Appendix E.4.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decode each stream behind a prompt of `prompt` tokens, and measure at the `lengths` (decoded tokens), rising.

    reference_step: tokens of a step of the reference, which writes a state for each of them whatever their number.
    """

    streams: tuple[Stream, ...]
    prompt: int
    lengths: tuple[int, ...]
    reference_step: int = 1

    @property
    def texts(self) -> tuple[Stream, ...]:
        """The first stream of each text."""
        return tuple({(s.text, s.digest): s for s in reversed(self.streams)}.values())[::-1]

    @property
    def text_of_row(self) -> list[int]:
        """Index of each stream's text among `texts`."""
        places = {(s.text, s.digest): i for i, s in enumerate(self.texts)}
        return [places[s.text, s.digest] for s in self.streams]

    def positions(self, length: int) -> range:
        """Decoded tokens whose outputs count at a length: the last 256, fewer where it is shorter."""
        return range(max(0, length - POSITIONS), length)


class ReferenceFiles:
    """Arrays of a folder, written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, kind: str, length: int) -> Path:
        return self._folder / f"reference-of-texts-{kind}-{length}.npy"

    def complete(self, lengths: Sequence[int]) -> bool:
        """Whether every length is there."""
        return all(self._path(kind, n).exists() for kind in ("logprobs", "states") for n in lengths)

    def logprobs(self, length: int) -> NDArray[np.float32]:
        """[positions, texts, V], mapped from the disk."""
        return np.asarray(np.load(self._path("logprobs", length), mmap_mode="r"))

    def states(self, length: int) -> NDArray[np.float32]:
        """[layers, texts, H, P, N] after `length` tokens."""
        return np.asarray(np.load(self._path("states", length)))

    @property
    def run(self) -> Path:
        """Where the reference's own state is saved after each length."""
        return self._folder / "reference-run.pt"

    def save(self, kind: str, length: int, tensor: Tensor) -> None:
        """Write one array; it appears under its name only when whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self._path(kind, length)) as file:
            np.save(file, tensor.cpu().numpy())


def write_reference(
    model: Model, plan: Plan, files: ReferenceFiles, report: Callable[[int], None], *, keep_states: bool = True
) -> None:
    """Conventional decoding with float32 states over the plan; `report` hears the tokens done after each step.

    keep_states: save its own state after each length, from which a longer plan goes on.
    """
    step = plan.reference_step
    replay = ReplayConfig(window=step, max_step_tokens=step)
    saved = usable_run(load_run(files.run), plan, [n for n in plan.lengths if not files.complete([n])])
    run = ForcedDecoding(model, replay, plan.texts, plan.prompt, conventional=True, saved=saved)
    vocab, done = model.checkpoint.geometry.vocab, run.position - plan.prompt
    for length in [n for n in plan.lengths if n > done]:
        window = plan.positions(length)
        kept = torch.empty((len(window), len(plan.texts), vocab), device=model.device)
        if window.start < done:  # lengths closer than the window: what they share was measured before
            previous = files.logprobs(done)
            shared = done - window.start
            kept[:shared] = torch.from_numpy(previous[len(previous) - shared :].copy())
        while done < length:
            logits = run.step(length - done)
            tokens = logits.shape[1]
            first = max(0, window.start - done)  # of the step's tokens in the window
            if first < tokens:
                here = done + first - window.start
                kept[here : here + tokens - first] = log_softmax(logits[:, first:]).transpose(0, 1).float()
            done += tokens
            report(done)
        files.save("logprobs", length, kept)
        files.save("states", length, run.states())
        if keep_states:
            run.save(files.run)


def usable_run(saved: SavedRun | None, plan: Plan, missing: Sequence[int]) -> SavedRun | None:
    """The saved run if it stands before all positions that are still to be measured, else None."""
    if saved is None or not missing or saved.position - plan.prompt > plan.positions(missing[0]).start:
        return None
    return saved
