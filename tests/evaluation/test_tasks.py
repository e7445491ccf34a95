"""Generated tasks: what they ask for, and answers that are the model's own, from a state of the stated length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.evaluation.small import PROMPT, random_streams, silent, small_model
from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.runtime.evaluation import forcing, tasks
from trtllm_replayssm.runtime.evaluation.configurations import parse_configuration
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding
from trtllm_replayssm.runtime.evaluation.task_texts import brackets, copying, make_tasks, recall
from trtllm_replayssm.runtime.evaluation.tasks import run_task_grid
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint


class Letters:
    """A tokenizer of one id a character, within the small checkpoints' vocabulary."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % 64 for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids)


def test_answers_follow_from_the_texts() -> None:
    rng = np.random.default_rng(3)
    task = copying(rng)
    line = task.text.split("\n")[2]
    assert task.text.split("\n")[3] == line and task.text.split("\n")[4] + task.answer == line
    task = recall(rng)
    question = task.text.split("\n")[-1]
    assert (question + task.answer) in task.text.split("\n")[2:8]
    task = brackets(rng)
    depth: list[str] = []
    for c in (task.text.split("\n")[-1] + task.answer).split():
        if c in "([{":
            depth.append(c)
        else:
            assert {"(": ")", "[": "]", "{": "}"}[depth.pop()] == c
    assert depth == []


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert make_tasks(3, seed=5) == make_tasks(3, seed=5) != make_tasks(3, seed=6)
    assert [t.name for t in make_tasks(2)] == ["copying"] * 2 + ["recall"] * 2 + ["brackets"] * 2


@pytest.mark.parametrize("name", ["nemotron-dense", "qwen-dense"])
def test_accuracy_is_that_of_a_session_which_decodes_text_and_task_in_one_go(name: str) -> None:
    model, length = small_model(name), 20
    streams = random_streams(model, 1, PROMPT + length + 1)
    configuration = parse_configuration("shared-nvfp4-sr-L4", 16)
    rows = run_task_grid(
        model, Letters(), streams, [configuration], [0, length], silent, prompt=PROMPT, examples=1
    )  # fmt: skip
    with Checkpoint.open(CHECKPOINTS / name) as checkpoint:
        for task in make_tasks(1):
            ids = Letters().encode(task.text + task.answer)
            pool = PoolConfig(slots=1, max_seq_len=PROMPT + length + len(ids))
            session = TorchSession.from_checkpoint(checkpoint, configuration.replay, pool)
            slot = session.allocate(streams[0].seed)
            session.prefill([PrefillChunk(slot, streams[0].ids[:PROMPT], True)])
            right = []
            forced = [*streams[0].ids[PROMPT : PROMPT + length], *ids]
            for place, token in enumerate(forced[:-1]):
                logits = session.decode([DecodeRow(slot, [token])])[0][0]
                session.commit([1])
                if place + 1 >= length + len(task.text):
                    right.append(int(logits.argmax()) == forced[place + 1])
            (row,) = [r for r in rows if r["task"] == task.name and r["length"] == length]
            assert row["tokens"] == len(task.answer) == len(right)
            assert row["accuracy"] == pytest.approx(float(np.mean(right)), abs=1e-4)


@pytest.mark.parametrize("name", ["shared-nvfp4-sr-L4", "shared-nvfp4-rtn-L3"])
def test_examples_behind_rounded_checkpoints_go_on_as_from_the_pools(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba-2: all logits of the examples, bit for bit, over several flushes of theirs."""
    heard: list[np.ndarray] = []

    class Listening(ForcedDecoding):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            decode = self.session.decode

            def listen(rows: Sequence[DecodeRow]) -> list[np.ndarray]:
                found = decode(rows)
                heard.extend(np.array(each) for each in found)
                return found

            monkeypatch.setattr(self.session, "decode", listen)

    monkeypatch.setattr(tasks, "ForcedDecoding", Listening)
    model = small_model("nemotron-dense")
    streams = random_streams(model, 2, PROMPT + 6)

    def logits() -> list[np.ndarray]:
        heard.clear()
        run_task_grid(
            model, Letters(), streams, [parse_configuration(name, 3)], [5], silent, prompt=PROMPT, examples=1
        )  # fmt: skip
        return heard[len(heard) // 2 :]  # behind those of the float32 run

    pools = logits()
    monkeypatch.setattr(forcing, "needs_rounding_pass", lambda model, replay: replay.recurrence is StateFormat.NVFP4)
    passed = logits()
    assert len(pools) == len(passed) > 3 * 20
    assert all(np.array_equal(a, b) for a, b in zip(pools, passed, strict=True))


def test_float32_is_paired_with_itself() -> None:
    model = small_model("nemotron-dense")
    streams = random_streams(model, 2, PROMPT + 9)
    names = ["shared-fp32-L16", "separate-nvfp4-fp32-L4"]
    rows = run_task_grid(
        model, Letters(), streams, [parse_configuration(n, 16) for n in names], [8], silent, prompt=PROMPT, examples=2
    )  # fmt: skip
    paired = [r for r in rows if r["configuration"] == names[0]]
    assert all(r["accuracy"] == r["fp32"] and r["won"] == r["lost"] == 0 for r in paired)
    for row in rows:
        assert round((row["accuracy"] - row["fp32"]) * row["tokens"]) == row["won"] - row["lost"]
