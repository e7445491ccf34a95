"""The sum over ranks on two GPUs: values against float64, the same bits on every rank, recorded, late and abandoned.

Oracle O1 for the sum, rounded once, and for the norm of the stored sum. Both ranks run one program; this reads what
they found.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.native import harness
from tests.parallel.sum_ranks_program import SIZE, run_rank

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
REASON = harness.unavailable() or (None if GPUS >= 2 else f"{GPUS} GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(240)]
LIMIT = 120  # seconds that a rank may take for one finding
ONE = 1.001  # rounding to nearest, and float32 on the way


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Finding after finding, of rank 0 and of rank 1."""
    store: Path = tmp_path_factory.mktemp("ranks") / "store"
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    for number in range(SIZE):
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(number, str(store), theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    findings: dict[str, list[dict[str, Any]]] = {}
    try:
        running = True
        while running:
            for end in ends:
                assert end.poll(LIMIT), f"a rank is stuck behind {list(findings)}"
                answer = end.recv()
                running = answer is not None
                if answer is not None:
                    findings.setdefault(answer[0], []).append(answer[1])
        yield findings
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("case", ["bfloat16 2560", "float16 2560", "bfloat16 3136"])
def test_sums_are_rounded_once_and_normalised_and_equal_on_all_ranks(found: Any, case: str) -> None:
    for finding in found[f"single_calls torch.{case}"]:
        assert finding["sum"] <= ONE and finding["norm"] <= ONE, finding
        assert finding["agreed"] and finding["marked"], finding


@pytest.mark.parametrize("case", ["bfloat16 2560", "float16 2560"])
def test_a_sum_needs_no_residual_and_no_norm(found: Any, case: str) -> None:
    for finding in found[f"plain_sums torch.{case}"]:
        assert finding["sum"] <= ONE and finding["agreed"], finding


def test_replays_give_what_single_calls_give_whoever_comes_late(found: Any) -> None:
    assert found["recorded torch.bfloat16 2560"] == [{"agreed": True, "same": True, "finite": True}] * SIZE


def test_nothing_is_read_too_early_or_twice_in_thousands_of_sums(found: Any) -> None:
    assert found["many torch.bfloat16 2560"] == [{"wrong": 0, "marked": True}] * SIZE


def test_a_rank_that_does_not_come_is_given_up(found: Any) -> None:
    first, second = found["given_up torch.bfloat16 2560"]
    assert first["nan"] == [True, True] and first["gave_up"] == 1 and second["gave_up"] == 0
    assert 0.4 < first["seconds"][0] < 5.0 and first["seconds"][1] < 0.4, "the second call waits for nobody"
