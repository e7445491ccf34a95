"""The numpy interpreter on whole models, against logits that transformers computed in float32 by one-shot forwards."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paths import ROOT, require_model
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.models import model_of
from trtllm_replayssm.spec.accept import greedy_accept
from trtllm_replayssm.spec.graph import NumpyGraph, SequenceState, StepKind
from trtllm_replayssm.weights.checkpoint import Checkpoint

SMALL = ["nemotron-dense", "nemotron-moe", "nemotron-moe-groups", "qwen-dense", "qwen-moe"]
TRAINED = ["nemotron-tiny", "nemotron-moe-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny"]
SMALL_NOISE = 1e-4  # of float32 references whose logits reach 3; a dropped bias or a wrong head order costs 0.1
TRAINED_NOISE = 2e-5
STORED_NOISE = 2e-2  # float16 corrections through several layers; a wrong state costs 0.1 or more


@cache
def opened(directory: Path) -> tuple[Checkpoint, dict[str, Any]]:
    reference: dict[str, Any] = json.loads((directory / "reference.json").read_text(encoding="utf-8"))
    return Checkpoint.open(directory), reference


def small(name: str) -> tuple[Checkpoint, dict[str, Any]]:
    return opened(ROOT / "tests" / "checkpoints" / name)


class Decoder:
    """One sequence through the interpreter."""

    def __init__(self, checkpoint: Checkpoint, state: SequenceState) -> None:
        self.model, self.geometry = model_of(checkpoint.geometry), checkpoint.geometry
        self.state = state
        self.graph = NumpyGraph(checkpoint, state)

    def forward(self, ids: list[int], accepted: int | None = None) -> ModelOutput[np.ndarray]:
        output = self.model.forward(self.graph, self.geometry, np.array(ids, np.int64))
        self.state.commit(len(ids), accepted)
        return output

    def prompt(self, ids: list[int], chunks: int) -> np.ndarray:
        """Logits of the last token after a prompt in about `chunks` chunks."""
        parts = [list(p) for p in np.array_split(np.array(ids), chunks)]
        for index, piece in enumerate(parts):
            self.state.kind = StepKind.PROMPT_END if index == len(parts) - 1 else StepKind.PROMPT
            logits = self.forward(piece).logits
        self.state.kind = StepKind.DECODE
        return logits[-1]

    def steps(self, ids: list[int], size: int) -> np.ndarray:
        """Logits of all tokens, decoded in steps of `size`."""
        return np.concatenate([self.forward(ids[i : i + size]).logits for i in range(0, len(ids), size)])


def worst(logits: np.ndarray, prompt: dict[str, Any]) -> float:
    top = prompt["top20"]
    return float(np.abs(logits[top["ids"]] - np.array(top["logits"])).max())


def assert_matches(checkpoint: Checkpoint, prompt: dict[str, Any], noise: float) -> None:
    """The conventional recurrence in one shot, and replay with two windows in steps and prompt chunks."""
    ids = prompt["input_ids"]
    one_shot = Decoder(checkpoint, SequenceState()).forward(ids).logits
    assert worst(one_shot[-1], prompt) < noise
    for window, size in ((4, 3), (16, 1)):
        config = ReplayConfig(window=window, max_step_tokens=size)
        replayed = Decoder(checkpoint, SequenceState(replay=config, exact=True)).steps(ids, size)
        np.testing.assert_allclose(replayed, one_shot, rtol=0, atol=1e-9)
        chunked = Decoder(checkpoint, SequenceState(replay=config, exact=True)).prompt(ids, 3)
        np.testing.assert_allclose(chunked, one_shot[-1], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_logits_equal_the_references(name: str) -> None:
    checkpoint, reference = small(name)
    for prompt in reference["prompts"]:
        assert_matches(checkpoint, prompt, SMALL_NOISE)


@pytest.mark.parametrize("name", TRAINED)
def test_logits_equal_the_references_of_trained_models(name: str) -> None:
    checkpoint, reference = opened(require_model(name))
    assert_matches(checkpoint, reference["prompts"][0], TRAINED_NOISE)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("drafts", [0, 3])
def test_greedy_output_equals_the_references_with_drafts_that_are_wrong_now_and_then(name: str, drafts: int) -> None:
    """Float32 pools as stored. Drafts are the reference's tokens with about every sixth replaced: acceptance varies."""
    checkpoint, reference = small(name)
    for prompt in reference["prompts"]:
        config = ReplayConfig(window=5, max_step_tokens=drafts + 1)
        decoder = Decoder(checkpoint, SequenceState(replay=config))
        out = [int(decoder.prompt(prompt["input_ids"], 2).argmax())]
        lengths = set()
        while len(out) < len(prompt["greedy"]):
            guess = prompt["greedy"][len(out) : len(out) + drafts]
            guess = [(t + 1) % 64 if 7 * (len(out) + i) % 11 < 2 else t for i, t in enumerate(guess)]
            before = decoder.state.cursors.position
            logits = decoder.model.forward(decoder.graph, decoder.geometry, np.array([out[-1], *guess])).logits
            result = greedy_accept(logits, guess)
            decoder.state.commit(len(guess) + 1, result.committed)
            assert decoder.state.cursors.position == before + result.committed
            out += result.tokens
            lengths.add(result.committed)
        first = next((i for i, (a, b) in enumerate(zip(out, prompt["greedy"], strict=False)) if a != b), None)
        assert first is None or prompt["margins"][first] < SMALL_NOISE * 10, first
        assert drafts == 0 or len(lengths) > 2


@pytest.mark.parametrize("name", SMALL)
def test_low_precision_pools_change_logits_little_and_only_after_the_first_rounding(name: str) -> None:
    checkpoint, reference = small(name)
    ids = reference["prompts"][2]["input_ids"]
    exact = Decoder(checkpoint, SequenceState()).forward(ids).logits
    errors = []
    for recurrence, read in (
        (StateFormat.FLOAT32, None),
        (StateFormat.FLOAT16, StateFormat.FP8),
        (StateFormat.FP8, StateFormat.NVFP4),
    ):
        config = ReplayConfig(window=8, max_step_tokens=2, recurrence=recurrence, read=read)
        logits = Decoder(checkpoint, SequenceState(replay=config)).steps(ids, 2)
        error = np.abs(logits - exact).max(-1)
        assert error[:8].max() < STORED_NOISE  # nothing was rounded but corrections
        errors.append(error.mean())
    assert errors[0] < STORED_NOISE and errors[0] < errors[1] < errors[2] < 1.0, errors


def test_mtp_head_gives_the_drafts_of_the_reference() -> None:
    checkpoint, reference = opened(require_model("qwen3_5-tiny"))
    prompt = reference["prompts"][0]
    hidden = Decoder(checkpoint, SequenceState()).forward(prompt["input_ids"]).hidden
    head = Decoder(checkpoint, SequenceState())
    ids = [*prompt["input_ids"][1:], prompt["greedy64"][0]]
    for draft in prompt["mtp"]["first_step_drafts"]:
        output = head.model.mtp_forward(head.graph, head.geometry, np.array(ids), hidden)
        head.state.commit(len(ids))
        assert worst(output.logits[-1], draft) < TRAINED_NOISE
        ids, hidden = [int(output.logits[-1].argmax())], output.hidden[-1:]


def test_what_cannot_roll_back_refuses_to() -> None:
    checkpoint, reference = small("nemotron-dense")
    ids = reference["prompts"][0]["input_ids"]
    with pytest.raises(ContractError, match="accepted"):
        Decoder(checkpoint, SequenceState()).forward(ids, accepted=2)
    prompt = SequenceState(replay=ReplayConfig(), kind=StepKind.PROMPT_END)
    with pytest.raises(ContractError, match="accepted"):
        Decoder(checkpoint, prompt).forward(ids, accepted=2)
