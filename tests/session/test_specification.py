"""The torch session against the numpy interpreter of the same models, both over replay pools.

Both round at the same points (corrections, checkpoints) and draw the same random words, one in float64 and one in
float32, so they agree about as closely as two float32 runs do, whatever the pool's formats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.session.sessions import checkpoint, open_session, sequence
from tests.tolerance import CORRECTION_LOGIT_NOISE, LOGIT_NOISE, REPLAY_LOGIT_NOISE
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.models import model_of
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.spec.cursors import Cursors
from trtllm_replayssm.spec.graph import NumpyGraph, SequenceState, StepKind

SEED = 77
MODELS = ("nemotron-moe", "qwen-dense", "qwen-moe")
CHUNKS = [7, 12]  # of a 19-token prompt
STEPS = [(4, 2), (1, 1), (3, 0), (3, 3), (2, 1), (4, 4), (4, 1), (1, 1), (3, 2), (4, 4)]  # (tokens, accepted)


class Both:
    """One sequence in both implementations."""

    def __init__(self, name: str, **formats: Any) -> None:
        self.session: TorchSession = open_session(name, window=6, **formats)
        self.slot = self.session.allocate(SEED)
        self.state = SequenceState(replay=self.session.replay, cursors=Cursors(seed=SEED))
        self.graph = NumpyGraph(checkpoint(name), self.state)
        self.model = model_of(self.session.geometry)

    def _numpy(self, tokens: list[int], kind: StepKind) -> np.ndarray:
        self.state.kind = kind
        return np.asarray(self.model.forward(self.graph, self.session.geometry, np.array(tokens)).logits)

    def prompt(self, tokens: list[int], *, last: bool) -> float | None:
        """Largest difference of the last token's logits."""
        got = self.session.prefill([PrefillChunk(self.slot, tokens, last)])[0]
        want = self._numpy(tokens, StepKind.PROMPT_END if last else StepKind.PROMPT)
        self.state.commit(len(tokens))
        return None if got is None else float(np.abs(got - want[-1]).max())

    def step(self, tokens: list[int], accepted: int) -> float:
        """Largest difference of a step's logits."""
        got = self.session.decode([DecodeRow(self.slot, tokens)])[0]
        want = self._numpy(tokens, StepKind.DECODE)
        self.session.commit([accepted])
        self.state.commit(len(tokens), accepted)
        cursors = self.session.cursors(self.slot)
        mine = self.state.cursors
        assert (cursors.origin, cursors.h, cursors.position, cursors.seed) == (
            mine.origin, mine.h, mine.position, mine.seed,
        )  # fmt: skip
        return float(np.abs(got - want).max())

    def run(self) -> list[float]:
        """A chunked prompt, then verify steps whose rejected drafts are wrong tokens."""
        ids, differences = sequence(self.name), []
        at = 0
        for i, size in enumerate(CHUNKS):
            found = self.prompt(ids[at : at + size], last=i == len(CHUNKS) - 1)
            differences += [] if found is None else [found]
            at += size
        for width, accepted in STEPS:
            wrong = [(t + 17) % 250 + 3 for t in ids[at + accepted : at + width]]
            differences.append(self.step([*ids[at : at + accepted], *wrong], accepted))
            at += accepted
        return differences

    @property
    def name(self) -> str:
        return self.session.geometry.name


def assert_agree(name: str, differences: list[float]) -> None:
    assert len(differences) == 11
    worst = {"nemotron-moe": LOGIT_NOISE, "qwen-dense": REPLAY_LOGIT_NOISE, "qwen-moe": CORRECTION_LOGIT_NOISE[1]}
    assert np.median(differences) <= LOGIT_NOISE and max(differences) <= worst[name], differences


@pytest.mark.parametrize("name", MODELS)
def test_float32_pools_agree_over_a_whole_run(name: str) -> None:
    assert_agree(name, Both(name).run())


FORMATS = [
    {"recurrence": StateFormat.FLOAT16},
    {"recurrence": StateFormat.FP8},
    {"recurrence": StateFormat.FLOAT32, "read": StateFormat.NVFP4},
    {"recurrence": StateFormat.FP8, "read": StateFormat.NVFP4},
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: "-".join(v.value for v in f.values()))
def test_a06_low_precision_pools_round_at_the_specified_points(name: str, formats: dict[str, StateFormat]) -> None:
    """A06: same rounding points in the same order. A float32 state that differs in its last bits may round to the
    other neighbour here and there; a rounding left out, or done at another time, moves every element.
    """
    both, exact = Both(name, **formats), Both(name)
    assert_agree(name, both.run())
    low, high = both.session.pools, exact.session.pools
    exact.run()
    for layer, state in low.ssm.items():
        spec = both.state.replay_layers[layer]
        index = both.session.pools.cursors.h.new_tensor([both.slot]).long()
        got = state.checkpoint.load(index)[0].numpy()  # type: ignore[union-attr]
        other = high.ssm[layer].checkpoint.load(index)[0].numpy()  # type: ignore[union-attr]
        scale = np.abs(other).max()
        agree = np.abs(got - spec.checkpoint).mean() / scale
        rounding = np.abs(got - other).mean() / scale
        if formats["recurrence"] is not StateFormat.FLOAT32:
            assert agree <= rounding / 4, (agree, rounding)
        else:
            assert agree <= 1e-4
