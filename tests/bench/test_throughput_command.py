"""`bench throughput` end to end on a CPU: a small checkpoint with drafts, both caches, the report and the refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.session.sessions import CHECKPOINTS, reference
from trtllm_replayssm.bench.throughput.compare import margin_of
from trtllm_replayssm.bench.throughput.dataset import BenchRequest
from trtllm_replayssm.bench.throughput.drive import Traffic
from trtllm_replayssm.bench.throughput.run import ThroughputSetup
from trtllm_replayssm.cli import main
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.llm import LLM

NAME = "qwen-dense"
SMALL = str(CHECKPOINTS / NAME)
KEYS = {"engine", "machine", "world_info", "request_info", "performance", "streaming_metrics", "decoding_stats",
        "dataset", "conventional", "text_equality", "speed_up_over_conventional"}  # fmt: skip


def requests(tmp_path: Path, count: int = 4) -> str:
    path = tmp_path / "requests.jsonl"
    prompts = [entry["input_ids"] for entry in reference(NAME)]
    lines = [
        json.dumps({"task_id": i, "input_ids": prompts[i % len(prompts)][: 9 + i], "output_tokens": 6 + 2 * i})
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_the_report_of_a_drafting_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_file = tmp_path / "report.json"
    code = main(
        ["bench", "throughput", SMALL, "--dataset", requests(tmp_path), "--concurrency", "2", "--max_batch_size", "3",
         "--request_rate", "200", "--drafter", "ngram", "--draft-len", "2", "--window", "8", "--max-seq-len", "64",
         "--warmup", "1", "--report_json", str(report_file)]
    )  # fmt: skip
    report = json.loads(report_file.read_text())
    assert code == 0 and report.keys() == KEYS
    assert report["text_equality"] == {
        "green": True, "equal": 4, "near_ties": 0, "different": 0, "first_differences": []
    }
    assert report["request_info"]["num_requests"] == 4
    assert report["request_info"]["avg_output_length"] == (6 + 8 + 10 + 12) / 4
    assert report["performance"].keys() == report["conventional"]["performance"].keys()
    steps = report["decoding_stats"]["acceptance_length_histogram"]
    emitted = sum(int(length) * count for length, count in steps.items())
    assert emitted + 4 == 6 + 8 + 10 + 12  # the first token of each comes from its prompt
    assert report["speed_up_over_conventional"] > 0
    out = capsys.readouterr().out
    assert "text equal for 4 of 4 requests" in out and "times the conventional output rate" in out


@pytest.mark.parametrize(
    ("flags", "batch", "concurrency"),
    [([], 8, 8), (["--concurrency", "9"], 9, 9), (["--concurrency", "9", "--max-batch-size", "2"], 2, 9),
     (["--max-batch-size", "2"], 2, 2)],
)  # fmt: skip
def test_the_batch_holds_the_requests_in_flight_unless_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], batch: int, concurrency: int
) -> None:
    def stop(setup: ThroughputSetup, requests: Sequence[BenchRequest], traffic: Traffic, noise: float) -> None:
        assert (setup.max_batch_size, traffic.concurrency) == (batch, concurrency)
        raise ConfigError("bench throughput", "engine", expected="none in this test", got="both sizes")

    monkeypatch.setattr("trtllm_replayssm.bench.throughput.run.measure", stop)
    assert main(["bench", "throughput", SMALL, "--dataset", requests(tmp_path), *flags]) == 1


@pytest.mark.parametrize("flag", ["--concurrency", "--max-batch-size"])
def test_a_size_of_zero_is_refused(tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", SMALL, "--dataset", requests(tmp_path), flag, "0"]) == 1
    assert flag in capsys.readouterr().err


def test_a_request_that_does_not_fit_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "throughput", SMALL, "--dataset", requests(tmp_path), "--max-seq-len", "12"]
    assert main(arguments) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_margins_are_those_of_the_model() -> None:
    """Against the reference's logits of the last prompt position."""
    entry = reference(NAME)[0]
    ids, best, logits = entry["input_ids"], entry["top20"]["ids"], entry["top20"]["logits"]
    with LLM(SMALL, max_seq_len=64, max_batch_size=1) as llm:
        margin = margin_of(llm)
        assert margin(ids, best[0], best[0]) == 0.0
        assert margin(ids, best[0], best[3]) == pytest.approx(logits[0] - logits[3], abs=1e-3)
        assert margin(ids, best[3], best[0]) == margin(ids, best[0], best[3])
        assert margin(ids, best[0], -1) == float("inf")
