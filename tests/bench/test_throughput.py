"""The throughput benchmark's parts: request files, arrivals, trtllm-bench's numbers, and when two runs agree."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from trtllm_replayssm.bench.throughput.compare import compare
from trtllm_replayssm.bench.throughput.dataset import BenchRequest, read_dataset
from trtllm_replayssm.bench.throughput.drive import Traffic
from trtllm_replayssm.bench.throughput.report import (
    RequestRecord,
    acceptance_fields,
    host_fields,
    percentiles,
    performance_fields,
)
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.outputs import CompletionOutput, Prefix, RequestOutput
from trtllm_replayssm.runtime.scheduler.times import RequestTimes


def dataset(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_has_text_or_ids_and_ids_come_first(tmp_path: Path) -> None:
    path = dataset(
        tmp_path,
        '{"task_id": 0, "prompt": "a b", "output_tokens": 4}\n\n'
        '{"task_id": 1, "input_ids": [1, 2], "output_tokens": 5}\n'
        '{"task_id": 2, "prompt": "x", "logits": [3], "output_tokens": 6}\n',
    )
    assert read_dataset(path) == [
        BenchRequest(task_id=0, prompt="a b", output_tokens=4), BenchRequest(task_id=1, prompt=[1, 2], output_tokens=5),
        BenchRequest(task_id=2, prompt=[3], output_tokens=6),
    ]  # fmt: skip
    assert [r.task_id for r in read_dataset(path, 2)] == [0, 1]


@pytest.mark.parametrize(
    "line",
    [
        "no json", "[1]", '{"prompt": "a", "output_tokens": 3}', '{"task_id": 1, "prompt": "a", "output_tokens": 0}',
        '{"task_id": 1, "prompt": "a", "output_tokens": true}', '{"task_id": 1, "output_tokens": 3}',
        '{"task_id": 1, "input_ids": [], "output_tokens": 3}', '{"task_id": 1, "input_ids": [1.5], "output_tokens": 3}',
        '{"task_id": 1, "prompt": 7, "output_tokens": 3}',
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    good = '{"task_id": 0, "prompt": "a", "output_tokens": 3}\n'
    with pytest.raises(ConfigError, match="line 2"):
        read_dataset(dataset(tmp_path, good + line + "\n"))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one request"):
        read_dataset(dataset(tmp_path, "\n"))


def test_poisson_arrivals_have_their_rate_and_seed() -> None:
    moments = Traffic(concurrency=4, request_rate=50.0).arrivals(5000)
    gaps = [b - a for a, b in pairwise(moments)]
    assert moments[0] == 0.0 and min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.06)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # exponential: 1 / e
    assert moments == Traffic(concurrency=9, request_rate=50.0).arrivals(5000)
    assert moments != Traffic(concurrency=4, request_rate=50.0, seed=1).arrivals(5000)
    assert Traffic(concurrency=4).arrivals(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("settings", [{"concurrency": 0}, {"concurrency": 1, "request_rate": 0.0}])
def test_traffic_that_cannot_be_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Traffic(**settings)  # type: ignore[arg-type]


def test_the_report_has_the_numbers_of_two_requests() -> None:
    """10 and 30 tokens in, 5 and 9 out; from 100 s: first tokens after 0.2 and 0.4 s, ends after 1 and 2 s."""
    records = [RequestRecord(10, 5, 100.0, 100.2, 101.0), RequestRecord(30, 9, 100.5, 100.9, 102.5)]
    found = performance_fields(records)
    speed, stream = found["performance"], found["streaming_metrics"]
    assert found["request_info"] == pytest.approx(
        {"num_requests": 2, "avg_num_concurrent_requests": 1.2, "avg_input_length": 20.0, "avg_output_length": 7.0}
    )
    assert speed["total_latency_ms"] == pytest.approx(2500.0)
    assert speed["avg_request_latency_ms"] == pytest.approx(1500.0)
    assert speed["request_throughput_req_s"] == pytest.approx(0.8)
    assert speed["system_output_throughput_tok_s"] == pytest.approx(14 / 2.5)
    assert speed["system_total_throughput_tok_s"] == pytest.approx(54 / 2.5)
    assert speed["output_throughput_per_gpu_tok_s"] == speed["system_output_throughput_tok_s"]
    assert stream["avg_ttft_ms"] == pytest.approx(300.0)
    assert stream["avg_tpot_ms"] == pytest.approx(200.0)  # 0.8 s / 4 and 1.6 s / 8
    assert stream["token_output_speed_tok_s"] == pytest.approx(5.0)
    assert found["dataset"]["seq_len_stats"]["maximum"] == 39


def test_one_output_token_has_no_rate() -> None:
    stream = performance_fields([RequestRecord(3, 1, 0.0, 1.0, 1.0)])["streaming_metrics"]
    assert stream["avg_tpot_ms"] == 0.0 and stream["token_output_speed_tok_s"] == 0.0


def test_percentiles_take_elements() -> None:
    assert percentiles(list(range(100)), 2.0) == {
        "p50": 100.0, "p90": 180.0, "p95": 190.0, "p99": 198.0, "minimum": 0.0, "maximum": 198.0, "average": 99.0
    }  # fmt: skip


def test_acceptance_is_a_histogram_of_steps() -> None:
    stats = acceptance_fields({4: 3, 1: 1}, 3, "NGram")["decoding_stats"]
    assert stats["acceptance_length"] == 3.25 and stats["acceptance_length_histogram"] == {"1": 1, "4": 3}
    assert stats["acceptance_length_percentiles"]["p50"] == 4
    assert acceptance_fields({1: 8}, 0, None) == {} == acceptance_fields({}, 3, "MTP")


def test_the_host_is_told_by_the_launches_that_the_device_waited_for() -> None:
    assert host_fields(40, 10) == {"host": {"launches": 40, "late_launch_share": 0.25}}
    assert host_fields(0, 0) == {}


def output(ids: list[int]) -> RequestOutput:
    choice = CompletionOutput(index=0, tokens=Prefix(ids))
    return RequestOutput(
        request_id=0, prompt=None, prompt_token_ids=[7, 8], outputs=[choice], finished=True, times=RequestTimes()
    )


def test_a_first_difference_counts_unless_it_is_a_near_tie() -> None:
    asked: list[tuple[list[int], int, int]] = []

    def margin(ids: object, a: int, b: int) -> float:
        asked.append((list(ids), a, b))  # type: ignore[call-overload]
        return 0.01 if a == 5 else 3.0

    ours = [output([1, 2, 3]), output([1, 5, 9]), output([4, 4, 4])]
    theirs = [output([1, 2, 3]), output([1, 6, 3]), output([4, 4, 1])]
    found = compare(ours, theirs, margin, 0.1)
    assert (found.equal, len(found.ties), len(found.differences), found.green) == (1, 1, 1, False)
    assert asked == [([7, 8, 1], 5, 6), ([7, 8, 4, 4], 4, 1)]
    assert found.fields()["first_differences"][0] == {"request": 2, "token": 2, "margin": 3.0}
    assert compare(ours[:2], theirs[:2], margin, 0.1).green
    assert not compare(ours[:2], theirs[:2], lambda *_: float("nan"), 0.1).green


def test_an_output_that_is_too_short_is_no_tie() -> None:
    found = compare([output([1, 2])], [output([1, 2, 3])], lambda *_: 0.0, 1.0)
    assert not found.green
