"""The list for compute-sanitizer names tests that exist, and what the tool says is counted by kernel."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.native import sanitized
from tests.native.sanitized import KERNELS, Part, cases, collected, left_over, read_part, row_of

RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at void replayssm::weighed::streamedUpdateKernel<T<(int)1>>(P)+0x59d0
=========     and Write access at void replayssm::weighed::streamedUpdateKernel<T<(int)1>>(P)+0xd4f0 [2336 hazards]
=========
========= Warning: Race reported between Write access at void replayssm::directUpdateKernel<T>(P)+0x10
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
MEMORY = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void replayssm::attentionKernel<replayssm::AttentionTraits<__half, 64>>(P)+0x1c0
=========     by thread (0,0,0) in block (1,0,0)
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::elementwise_kernel<4>(int)+0x50
========= ERROR SUMMARY: 2 errors
"""


def parsed(tmp_path: Path, log: str) -> Part:
    return read_part(tmp_path / "results", tmp_path / "kernels", log, ended=False)


def test_every_name_of_the_list_is_a_test_and_stands_once() -> None:
    names = cases()
    assert len(set(names)) == len(names)
    assert not [n for n in names if "[" in n and n.partition("[")[0] in names], "the function has all its parameters"
    tests = collected(names)
    assert len(set(tests)) == len(tests) > 700
    assert len(cases(["test_slots.py"])) < len(names) and cases(["test_slots.py"]) != []


def test_findings_are_counted_by_kernel(tmp_path: Path) -> None:
    race, memory = parsed(tmp_path, RACE), parsed(tmp_path, MEMORY)
    assert race.ended and race.findings == {
        "Race reported: weighed::streamedUpdateKernel": 1, "Race reported: directUpdateKernel": 1
    }  # fmt: skip
    assert memory.ended and memory.findings == {
        "Invalid __global__ read: attentionKernel": 1,
        "Uninitialized __global__ memory read: not in a kernel of ours": 1,
    }  # fmt: skip
    assert not parsed(tmp_path, RACE.rsplit("\n", 2)[0]).ended and not parsed(tmp_path, "killed").ended


def test_a_line_says_what_did_not_pass(tmp_path: Path) -> None:
    results, kernels = tmp_path / "results", tmp_path / "kernels"
    outcomes = {"a": "passed", "b": "failed", "c": "skipped"}
    results.write_text("".join(json.dumps({"test": t, "outcome": o}) + "\n" for t, o in outcomes.items()))
    kernels.write_text('{"test": "a", "kernels": ["x", "y"]}\n{"test": "b", "kernels": ["y"]}\n')
    row = row_of(KERNELS, ["a", "b", "c", "d"], read_part(results, kernels, "", ended=True), {"gpu": "a GPU"})
    assert (row["cases"], row["passed"], row["skipped"], row["failed"], row["not_reached"]) == (4, 1, 1, ["b"], ["d"])
    (tmp_path / "lines").write_text(json.dumps(row) + "\n")
    assert left_over(tmp_path / "lines", KERNELS, ["a", "d", "e"]) == ["d"]
    assert left_over(tmp_path / "lines", "memcheck", ["a", "d"]) == ["a", "d"]
    assert row["kernels"] == 2 and row["names"] == ["x", "y"] and row["findings"] == {} and row["ended"]


def test_another_process_goes_on_behind_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One share of six tests: the second fails, the fourth takes its process along."""
    started: list[list[str]] = []

    def part_of(tool: str, tests: list[str], until: float, folder: Path) -> Part:
        started.append(list(tests))
        outcomes: dict[str, str] = {}
        for test in tests:
            if test == "dies":
                break
            outcomes[test] = "failed" if test == "fails" else "passed"
            if test == "fails":
                break
        return Part(outcomes=outcomes, ended=True)

    monkeypatch.setattr(sanitized, "run_part", part_of)
    tests = ["a", "fails", "b", "dies", "c", "d"]
    whole = sanitized.run_tool("memcheck", tests, 1, time.monotonic() + 60, tmp_path)
    assert whole.outcomes == {"a": "passed", "fails": "failed", "b": "passed", "c": "passed", "d": "passed"}
    assert [first[0] for first in started] == ["a", "b", "dies", "c"]
    started.clear()
    assert sanitized.run_tool("memcheck", tests, 2, time.monotonic() - 1, tmp_path).outcomes.keys() <= {*tests}
    assert len(started) == 2
