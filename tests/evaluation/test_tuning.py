"""`tune`: the time model against times it was made from, the choice, the file, and the engine that reads it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm import LLM
from trtllm_replayssm.bench import machine
from trtllm_replayssm.bench.cases import kernel_shapes
from trtllm_replayssm.cli import main, tune
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.tuning import VARIABLE, add_entry, read_tune_file, tune_key, with_tuned
from trtllm_replayssm.spec.traffic import best_window
from trtllm_replayssm.spec.tuning import choose_window, fit_times
from trtllm_replayssm.weights.checkpoint import Checkpoint

SHAPE = kernel_shapes()["super120b"]
H200 = ROOT / "benchmarks" / "results" / "h200_update.jsonl"


def rows_of(read: float, flush: float, record: float, *, window: int = 16, tokens: int = 1) -> list[dict[str, Any]]:
    by_h = {h: (flush if h + tokens > window else read) + record * h for h in range(1, window + 1)}
    return [
        {"what": "update", "shape": "super120b", "B": 256, "T": tokens, "L": window, "by_h": by_h},
        {"what": "update", "shape": "super120b", "B": 8, "T": tokens, "L": window, "by_h": {1: 1.0}},
        {"what": "update", "shape": "super120b", "B": 256, "T": tokens, "L": window, "by_h": {1: 9.0}, "read": "fp8"},
        {"what": "conventional", "shape": "super120b", "B": 256, "T": tokens, "L": 0, "by_h": {1: 5.0}},
    ]


def test_the_fit_finds_the_three_numbers_that_made_the_times() -> None:
    times = fit_times(rows_of(200.0, 500.0, 2.0), "super120b", 200, 1)
    assert times is not None and times.batch == 256 and times.samples == 16
    assert (times.read, times.flush, times.record) == pytest.approx((200.0, 500.0, 2.0))
    # a window of 4: steps with h = 1, 2, 3 read, the one with h = 4 flushes
    config = ReplayConfig(window=4)
    assert times.per_token(config, 1.0) == pytest.approx((202 + 204 + 206 + 508) / 4)


def test_launches_as_sessions_make_them_count_where_there_are_any() -> None:
    slow, quick = rows_of(300.0, 600.0, 3.0), [{**r, "settled": True} for r in rows_of(200.0, 500.0, 2.0)]
    times = fit_times([*slow, *quick], "super120b", 256, 1)
    assert times is not None and times.samples == 16
    assert (times.read, times.flush, times.record) == pytest.approx((200.0, 500.0, 2.0))


def test_without_fitting_rows_there_are_no_times() -> None:
    rows = rows_of(200.0, 500.0, 2.0)
    assert fit_times(rows, "nano4b", 256, 1) is None
    assert fit_times(rows, "super120b", 256, 2) is None
    assert fit_times(rows[1:2], "super120b", 8, 1) is None, "one time does not fix three numbers"


def test_the_choice_follows_the_times_and_says_so() -> None:
    config = ReplayConfig()
    costly_flush = choose_window(SHAPE, config, 1.0, fit_times(rows_of(200.0, 5000.0, 1.0), "super120b", 256, 1))
    costly_record = choose_window(SHAPE, config, 1.0, fit_times(rows_of(200.0, 210.0, 20.0), "super120b", 256, 1))
    assert costly_flush.window > 32 and costly_record.window < 4
    by_bytes = choose_window(SHAPE, config, 1.0, None)
    assert by_bytes.by_time is None and by_bytes.window <= by_bytes.by_traffic == best_window(SHAPE, config, 1, 1.0)
    assert "no measurement" in by_bytes.why[1] and "is fastest" in costly_flush.why[1]


def test_measured_times_of_a_window_predict_the_measured_mean() -> None:
    """The model against what it was not fitted to: means of whole windows, flushes included, as the GPU ran them."""
    found = [json.loads(line) for line in H200.read_text().splitlines()]
    rows = [r for r in found if r["what"] == "update" and r["B"] == 256 and r["settled"]]
    assert len(rows) == 20, "four shapes; T = 1, and T = 4 and 8 with all and no drafts accepted"
    for row in rows:
        times = fit_times(rows, row["shape"], 256, row["T"])
        assert times is not None
        config = ReplayConfig(window=row["L"], max_step_tokens=row["T"])
        # `us` is per step; 3 % accepts single steps off the line, and rejects a flush counted once too often (6 %)
        assert times.per_token(config, row["accepted"]) * row["accepted"] == pytest.approx(row["us"], rel=0.03)


def test_the_command_explains_and_the_engine_reads_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = CHECKPOINTS / "nemotron-dense", tmp_path / "tune.json"
    assert main(["tune", str(model), "--batch", "4", "--file", str(file)]) == 0
    assert "taken: L =" in capsys.readouterr().out
    (entries,) = read_tune_file(file).values()
    window = entries[0]["window"]
    assert window != 16, "else the next lines prove nothing"
    monkeypatch.delenv(VARIABLE, raising=False)
    for variable, want in ((None, 16), (str(file), window)):
        if variable:
            monkeypatch.setenv(VARIABLE, variable)
        with LLM(model, tokenizer=None, max_seq_len=32) as llm:
            assert llm._engine.session.replay.window == want
    with LLM(model, tokenizer=None, max_seq_len=32, replay_config=ReplayConfig(window=9)) as llm:
        assert llm._engine.session.replay.window == 9, "what is asked for stays"


def test_results_of_another_gpu_are_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for gpu, expected in (("NVIDIA H200", "is fastest"), ("NVIDIA B300", "no measurement")):
        arguments = ["tune", "nemotron-3-super-120b-a12b-nvfp4", "--gpu", gpu, "--batch", "256"]
        assert main([*arguments, "--results", str(H200), "--file", str(tmp_path / "t.json")]) == 0
        assert expected in capsys.readouterr().out
    assert len(read_tune_file(tmp_path / "t.json")) == 2


def test_the_closest_batch_counts_and_a_foreign_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpoint.open(CHECKPOINTS / "qwen-dense") as checkpoint:
        shape = checkpoint.geometry.ssm
    file, config = tmp_path / "tune.json", ReplayConfig()
    for batch, window in ((1, 30), (256, 12), (1, 31)):
        add_entry(file, tune_key(shape, config, "cpu"), {"batch": batch, "window": window, "launch": None})
    monkeypatch.setenv(VARIABLE, str(file))
    with caplog.at_level(logging.INFO):
        assert [with_tuned(config, shape, "cpu", b).window for b in (1, 12, 40, 512)] == [31, 31, 12, 12]
    assert caplog.messages[-1] == f"recurrent state: window 12, as the tune file {file} says"
    assert with_tuned(config, shape, "NVIDIA H200", 1) == config
    assert with_tuned(replace(config, max_step_tokens=2), shape, "cpu", 1).window == 16
    for text, got in (
        ('{"version": 1, "entries": {"a": [{"window": 12, "batch": 1}]}}', "version 1"),
        ('{"version": 2, "entries": {"a": [{"window": "12", "batch": 1, "launch": null}]}}', "another file"),
        ('{"version": 2, "entries": {"a": [{"window": 9, "batch": 1, "launch": {"kernel": "x"}}]}}', "another file"),
        ("[]", "another file"),
        ("[" * 100_000, "another file"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"version 2, got {got}.*run trtllm-replayssm tune again"):
            read_tune_file(file)


@pytest.mark.parametrize("batch", [0, -1, False, True, 1 << 31])
@pytest.mark.parametrize("field", ["batch", "window"])
def test_entries_that_no_engine_can_follow_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, batch: int
) -> None:
    file, config = tmp_path / "tune.json", ReplayConfig()
    entry = {"batch": 8, "window": 12, "launch": None, field: batch}
    file.write_text(json.dumps({"version": 2, "entries": {tune_key(SHAPE, config, "cpu"): [entry]}}))
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(ConfigError, match="got another file"):
        with_tuned(config, SHAPE, "cpu", 8)


@pytest.mark.parametrize(
    "text",
    [
        "[1]", "3", '{"meta": 1, "rows": 3}', "\udcff", "[" * 100_000, '{"gpu": "cpu", "what": "update"}',
        '{"gpu": "cpu", "what": "update", "shape": "x", "B": 0, "T": 1, "L": 16, "by_h": {"0": 1.0}}',
        '{"gpu": "cpu", "what": "update", "shape": "x", "B": 8, "T": 1, "L": 16, "by_h": {"0": NaN}}',
        '{"gpu": "cpu", "what": "update", "shape": "x", "B": 8, "T": 1, "L": 16, "by_h": {"x": 1.0}}',
    ],
)  # fmt: skip
def test_results_that_are_none_end_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    results, file = tmp_path / "results.json", tmp_path / "t.json"
    results.write_bytes(text.encode(errors="surrogateescape"))
    arguments = ["tune", str(CHECKPOINTS / "nemotron-dense"), "--file", str(file)]
    assert main([*arguments, "--results", str(results)]) == 1
    assert "--results" in capsys.readouterr().err and not file.exists()


@pytest.mark.parametrize(
    "flags",
    [["--accepted", "nan"], ["--accepted", "inf"], ["--accepted", "5"], ["--batch", "0"], ["--batch", "9" * 20]],
)
def test_what_cannot_be_measured_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    file = tmp_path / "t.json"
    arguments = ["tune", str(CHECKPOINTS / "nemotron-dense"), "--step-tokens", "4", "--keep-window"]
    assert main([*arguments, *flags, "--file", str(file)]) == 1
    assert flags[0] in capsys.readouterr().err and not file.exists()


def test_float32_steps_are_not_timed_for_states_that_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their times say nothing of the others, and cost minutes of a GPU."""
    timed: list[object] = []
    monkeypatch.setattr(tune, "_measure", lambda *asked: timed.append(asked) or ([], "NVIDIA H200"))
    monkeypatch.setattr(tune, "_launch", lambda *asked: {"launch": None, "why": []})
    monkeypatch.setattr(machine, "describe", lambda: {"gpu": "NVIDIA H200"})
    arguments = ["tune", "nemotron-3-super-120b-a12b-nvfp4", "--measure", "--file", str(tmp_path / "t.json")]
    assert main([*arguments, "--recurrence", "float16"]) == 0 and not timed
    assert "float16, NVIDIA H200, batch 8" in capsys.readouterr().out
    assert main(arguments) == 0 and len(timed) == 1


def test_a_file_that_cannot_be_added_to_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json"
    file.write_text('{"version": 1, "entries": {}}')
    arguments = ["tune", "nemotron-3-super-120b-a12b-nvfp4", "--measure", "--file", str(file)]
    assert main(arguments) == 1, "without a GPU measuring ends in another error"
    assert "got version 1" in capsys.readouterr().err
