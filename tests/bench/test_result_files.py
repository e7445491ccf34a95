"""What measurements write: a file from before outlives a command that fails, and what was measured until then stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.bench.step import plot
from trtllm_replayssm.cli import main
from trtllm_replayssm.errors import ConfigError

SMALL = str(CHECKPOINTS / "qwen-moe")
BEFORE = "results of another day\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of results from before."""
    path = tmp_path / "results.jsonl"
    path.write_text(BEFORE)
    return path


def names(file: Path) -> set[str]:
    return {path.name for path in file.parent.iterdir()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_kernels_without_a_gpu(file: Path) -> None:
    assert main(["bench", "kernel", "--suite", "plain", "--rows", "1", "--json", str(file)]) == 1
    assert file.read_text() == BEFORE and names(file) == {file.name}


def test_layers_without_a_model(file: Path) -> None:
    assert main(["bench", "step", str(file.parent / "none"), "--device", "cpu", "--json", str(file)]) == 1
    assert file.read_text() == BEFORE and names(file) == {file.name}


def test_steps_that_end_in_the_middle(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows until then are beside the file of before."""
    from trtllm_replayssm.bench.step import run

    whole = run.run_cases

    def broken(*arguments: Any, **named: Any) -> Iterator[Any]:
        for number, result in enumerate(whole(*arguments, **named)):
            if number == 1:
                raise ConfigError("bench step", "device", expected="a device", got="none any more")
            yield result

    monkeypatch.setattr(run, "run_cases", broken)
    command = [
        "bench", "step", SMALL, "--device", "cpu", "--activation", "float32", "--batch", "1", "--tokens", "1",
        "--window", "4", "--rounds", "1", "--context", "16", "--breakdown", "none", "--json", str(file),
    ]  # fmt: skip
    assert main(command) == 1
    assert file.read_text() == BEFORE
    partial = file.with_name(file.name + ".partial")
    assert [json.loads(line)["what"] for line in partial.read_text().splitlines()] == ["products", "step"]
    monkeypatch.setattr(run, "run_cases", whole)
    assert main(command) == 0
    assert names(file) == {file.name} and len(file.read_text().splitlines()) > 1


def test_a_report_into_a_folder_that_is_missing_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtllm_replayssm.bench.throughput import run

    def never(*_: Any) -> dict[str, Any]:
        raise AssertionError("the run had begun")

    monkeypatch.setattr(run, "measure", never)
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"task_id": 0, "input_ids": [1, 2], "output_tokens": 2}\n')
    report = tmp_path / "none" / "report.json"
    assert main(["bench", "throughput", SMALL, "--dataset", str(requests), "--report-json", str(report)]) == 1


def test_a_report_of_a_run_that_fails(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_replayssm.bench.throughput import run

    def fails(*_: Any) -> dict[str, Any]:
        raise ConfigError("bench throughput", "device", expected="a device", got="none any more")

    monkeypatch.setattr(run, "measure", fails)
    requests = file.with_name("requests.jsonl")
    requests.write_text('{"task_id": 0, "input_ids": [1, 2], "output_tokens": 2}\n')
    assert main(["bench", "throughput", SMALL, "--dataset", str(requests), "--report-json", str(file)]) == 1
    assert file.read_text() == BEFORE and names(file) == {file.name, "requests.jsonl"}


def test_a_figure_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    path = tmp_path / "steps.png"
    path.write_text(BEFORE)

    def fails(_: Any, target: Any, **_named: Any) -> None:
        if isinstance(target, Path):
            target.write_bytes(b"half a figure")
        raise OSError("no space left on the disk")

    monkeypatch.setattr(figure.Figure, "savefig", fails)
    row = {"what": "step", "model": "m", "layers": "0-7", "L": 16, "gpu": "a GPU", "B": 256, "floor_us": 600.0,
           "cache": "replay", "T": 1, "us": 1000.0, "breakdown_us": {"SSM": 500.0, "GEMM": 400.0}}  # fmt: skip
    with pytest.raises(OSError, match="disk"):
        plot.draw_steps([row], path)
    assert path.read_text() == BEFORE and names(path) == {path.name}
