"""`eval kl`: divergence and state error are what two sessions in step show, whatever the steps and interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.evaluation.small import PROMPT, silent, small_model, small_plan
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.evaluation import reference
from trtllm_replayssm.runtime.evaluation.configurations import parse_configuration
from trtllm_replayssm.runtime.evaluation.forcing import ForcedDecoding
from trtllm_replayssm.runtime.evaluation.journal import Journal
from trtllm_replayssm.runtime.evaluation.kl import run_divergence
from trtllm_replayssm.runtime.evaluation.measures import extra_loss, kl_divergence, log_softmax, relative_state_error
from trtllm_replayssm.runtime.evaluation.reference import Plan, ReferenceFiles

MODELS = ["nemotron-dense", "qwen-dense"]
HEADER = {"checkpoint": "small"}


def measured(
    folder: Path, model_name: str, plan: Plan, names: list[str], *, step: int = 1,
    progress: Callable[[str, int, int], None] = silent,
) -> list[dict[str, Any]]:  # fmt: skip
    journal = Journal(folder / "journal.jsonl", HEADER)
    configurations = [parse_configuration(name, step) for name in names]
    run_divergence(small_model(model_name), plan, configurations, journal, ReferenceFiles(folder), progress)
    return journal.rows


def test_divergence_and_error_of_a_case_worked_out_by_hand() -> None:
    p, q = (torch.tensor([probabilities]).double().log() for probabilities in ([0.5, 0.5], [0.25, 0.75]))
    assert kl_divergence(p, q)[0] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert kl_divergence(p, p)[0] == 0.0
    assert extra_loss(p, q, torch.tensor([1]))[0] == pytest.approx(np.log(0.5) - np.log(0.75))
    assert log_softmax(torch.tensor([1000.0, 1000.0])).exp().tolist() == [0.5, 0.5]
    exact = torch.zeros((1, 1, 2, 2, 2))
    exact[0, 0, 0] = 1.0
    assert relative_state_error(exact * 1.5, exact).tolist() == [[[0.5, 0.0]]]


@pytest.mark.parametrize("name", MODELS)
def test_the_result_is_what_two_sessions_in_step_show(name: str, tmp_path: Path) -> None:
    model, configuration = small_model(name), parse_configuration("shared-nvfp4-sr-L4")
    plan = small_plan(model, 12, 24)
    rows = measured(tmp_path, name, plan, [configuration.name])
    ours = ForcedDecoding(model, configuration.replay, plan.streams, PROMPT)
    exact = ForcedDecoding(model, configuration.replay, plan.streams, PROMPT, conventional=True)
    each = []
    for _ in range(24):
        pair = [run.step(1)[:, 0].double() for run in (exact, ours)]
        p, q = (x.log_softmax(-1) for x in pair)
        each.append(torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1))
    by_row = torch.stack(each).mean(0)
    (row,) = [r for r in rows if r["length"] == 24]
    assert row["kl_by_row"] == pytest.approx(by_row.tolist(), rel=1e-3)
    assert row["kl"] == pytest.approx(float(by_row.mean()), rel=1e-3) and row["kl"] > 1e-7
    error = relative_state_error(ours.states(), exact.states()).mean(dim=1).numpy()
    assert np.allclose(row["state_error"], error, rtol=1e-3)
    assert row["state_error_worst_head"] == pytest.approx(error.max(), rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_low_precision_diverges_and_float32_does_not(name: str, tmp_path: Path) -> None:
    names = ["shared-fp32-L4", "shared-fp8-sr-L4", "shared-nvfp4-sr-L4", "separate-nvfp4-fp32-L4"]
    kl = {r["configuration"]: r for r in measured(tmp_path, name, small_plan(small_model(name), 32), names)}
    # what float32 leaves are the float16 corrections of GDN, 2^-7 of an FP8 step: their divergence is its square
    assert abs(kl["shared-fp32-L4"]["kl"]) < kl["shared-fp8-sr-L4"]["kl"] / 100
    assert kl["shared-nvfp4-sr-L4"]["kl"] > kl["shared-fp8-sr-L4"]["kl"]
    separate = np.array(kl["separate-nvfp4-fp32-L4"]["state_error"])
    assert separate[0].max() < 1e-6, "the first layer's recurrence sees exact inputs"
    assert np.array(kl["shared-nvfp4-sr-L4"]["state_error"])[0].max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_wide_steps_change_no_result(name: str, tmp_path: Path) -> None:
    names = ["shared-fp8-sr-L8", "separate-nvfp4-fp32-L8"]
    plain = measured(tmp_path / "1", name, small_plan(small_model(name), 20, 37), names)
    plan = small_plan(small_model(name), 20, 37, reference_step=16)
    for a, b in zip(measured(tmp_path / "16", name, plan, names, step=16), plain, strict=True):
        # a token that reads the checkpoint before or after its flush changes this by half and more
        assert a["kl"] == pytest.approx(b["kl"], rel=0.01)
        assert np.allclose(a["state_error"], b["state_error"], rtol=0.01, atol=1e-6)


def test_seeds_of_a_text_share_its_reference(tmp_path: Path) -> None:
    """Rows by text and seed: the reference decodes each text once, and so does a configuration that draws nothing."""
    first, second = small_plan(small_model("nemotron-dense"), 16).streams
    plan = Plan(streams=(first, replace(first, seed=9), second), prompt=PROMPT, lengths=(16,))
    assert plan.texts == (first, second) and plan.text_of_row == [0, 0, 1]
    names = ["shared-nvfp4-rtn-L4", "shared-nvfp4-sr-L4"]
    nearest, drawn = (r["kl_by_row"] for r in measured(tmp_path / "all", "nemotron-dense", plan, names))
    assert ReferenceFiles(tmp_path / "all").logprobs(16).shape[1] == 2
    assert nearest[0] == nearest[1] != nearest[2] and drawn[0] != drawn[1]
    for row, stream in enumerate(plan.streams):
        alone = replace(plan, streams=(stream,))
        found = [r["kl_by_row"][0] for r in measured(tmp_path / str(row), "nemotron-dense", alone, names)]
        assert found == pytest.approx([nearest[row], drawn[row]], rel=1e-3)


class _StoppedError(Exception):
    pass


def test_a_stopped_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    plan = small_plan(small_model("nemotron-dense"), 8, 16, 24)
    names = ["shared-fp8-sr-L4", "shared-nvfp4-rtn-L4"]
    want = measured(tmp_path / "whole", "nemotron-dense", plan, names)

    def stop(what: str, done: int, total: int) -> None:
        if what == names[0] and done == 20:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        measured(tmp_path / "part", "nemotron-dense", plan, names, progress=stop)
    path = tmp_path / "part" / "journal.jsonl"
    assert len(path.read_text().splitlines()) == 3, "header and two lengths"
    path.write_text(path.read_text() + '{"configuration": "shared-fp')
    decoded: list[str] = []
    got = measured(
        tmp_path / "part", "nemotron-dense", plan, names, progress=lambda what, done, total: decoded.append(what)
    )
    assert "reference" not in decoded
    assert got == want
    decoded.clear()
    measured(tmp_path / "part", "nemotron-dense", plan, names, progress=lambda what, done, total: decoded.append(what))
    assert decoded == [], "nothing is left to do"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", ["reference", "shared-fp8-sr-L4", "separate-nvfp4-fp32-L4"])
def test_it_goes_on_from_the_states_of_the_last_measured_length(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "POSITIONS", 4)  # windows apart, as those of real lengths are
    plan = small_plan(small_model(name), 9, 18, 27)
    names = ["shared-fp8-sr-L4", "separate-nvfp4-fp32-L4"]
    want = measured(tmp_path / "whole", name, plan, names)

    def stop(decoded: str, done: int, total: int) -> None:
        if decoded == what and done > 19:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        measured(tmp_path / "part", name, plan, names, progress=stop)
    heard: list[tuple[str, int]] = []
    got = measured(tmp_path / "part", name, plan, names, progress=lambda *now: heard.append(now[:2]))
    assert heard[0][0] == what and heard[0][1] > 18, "the first 18 tokens are not decoded again"
    assert got == want
    longer = small_plan(small_model(name), 9, 18, 27, 36)
    plan_streams = [replace(s, ids=s.ids[: len(o.ids)]) for s, o in zip(longer.streams, plan.streams, strict=True)]
    assert [s.ids for s in plan_streams] == [s.ids for s in plan.streams], "the same texts, cut later"
    heard.clear()
    more = measured(tmp_path / "part", name, longer, names, progress=lambda *now: heard.append(now[:2]))
    assert heard[0] == ("reference", 28) and more[: len(want)] == want and len(more) == 8


def test_a_journal_of_another_evaluation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, {"checkpoint": "a", "prompt": 4}).append({"length": 8})
    assert Journal(path, {"checkpoint": "a", "prompt": 4}).find(length=8) == {"length": 8}
    with pytest.raises(ConfigError, match="prompt 5"):
        Journal(path, {"checkpoint": "a", "prompt": 5})
    assert json.loads(path.read_text().splitlines()[0]) == {"checkpoint": "a", "prompt": 4}
