"""The committed checkpoints and references agree with transformers: parameters bit for bit, logits and greedy ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", minversion="5.17", reason="references need transformers 5.17")

import torch  # noqa: E402

from tests.tools.loaded_parameters import LoadedParameterError, check_loaded, file_tensors  # noqa: E402
from tests.tools.make_checkpoints import CHECKPOINTS, GREEDY_TOKENS, PROMPT_LENGTHS, SEEDS, last_logits, load  # noqa: E402

MAX_BYTES = 700_000
LOGIT_NOISE = 1e-4  # float32 sums in another order: 7e-5 was the worst seen; a dropped term costs 0.1 or more


def reference_of(name: str) -> dict[str, Any]:
    """The parsed reference.json of one checkpoint."""
    parsed: dict[str, Any] = json.loads((CHECKPOINTS / name / "reference.json").read_text(encoding="utf-8"))
    return parsed


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_e01_parameters_in_memory_are_the_bytes_of_the_file(name: str) -> None:
    model = load(CHECKPOINTS / name)  # checks all of them
    assert check_loaded(model, file_tensors(CHECKPOINTS / name)) == len(file_tensors(CHECKPOINTS / name))


@pytest.mark.parametrize("leaf", ["dt_bias", "A_log", "D", "out_proj.weight", "e_score_correction_bias", "up_proj"])
def test_e01_a_rerandomised_parameter_is_found(leaf: str) -> None:
    directory = CHECKPOINTS / "nemotron-moe"
    model = load(directory)
    name = next(n for n in model.state_dict() if n.endswith(leaf))
    value = model.state_dict()[name]
    value.view(-1)[-1] = torch.nextafter(value.view(-1)[-1], torch.tensor(torch.inf))
    with pytest.raises(LoadedParameterError, match=name):
        check_loaded(model, file_tensors(directory))


def test_e01_a_tensor_the_model_leaves_out_is_found() -> None:
    directory = CHECKPOINTS / "qwen-dense"
    tensors = {**file_tensors(directory), "model.language_model.layers.9.extra": torch.zeros(1)}
    with pytest.raises(LoadedParameterError, match=r"layers\.9\.extra"):
        check_loaded(load(directory), tensors)


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_e02_references_are_one_shot_forwards(name: str) -> None:
    model, reference = load(CHECKPOINTS / name), reference_of(name)
    assert [len(p["input_ids"]) for p in reference["prompts"]] == list(PROMPT_LENGTHS)
    for prompt in reference["prompts"]:
        ids = prompt["input_ids"]
        assert len(prompt["greedy"]) == len(prompt["margins"]) == GREEDY_TOKENS
        logits = last_logits(model, ids)
        expected = torch.tensor(prompt["top20"]["logits"])
        torch.testing.assert_close(logits[prompt["top20"]["ids"]], expected, rtol=0, atol=LOGIT_NOISE)
        # causal: one forward over prompt and output gives the logits of every step
        with torch.no_grad():
            tail = model(input_ids=torch.tensor([ids + prompt["greedy"]]), use_cache=False).logits[0, len(ids) - 1 : -1]
        best = tail.topk(2)
        assert best.indices[:, 0].tolist() == prompt["greedy"]
        margins = best.values[:, 0] - best.values[:, 1]
        torch.testing.assert_close(margins, torch.tensor(prompt["margins"]), rtol=0, atol=2 * LOGIT_NOISE)


@pytest.mark.parametrize("path", sorted(CHECKPOINTS.glob("*/model.safetensors")), ids=lambda p: p.parent.name)
def test_a_checkpoint_stays_small(path: Path) -> None:
    assert path.stat().st_size <= MAX_BYTES
