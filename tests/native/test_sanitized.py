"""The list for compute-sanitizer names tests that exist, and what the tool says is counted by kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.rooms import ROOT
from tests.native import sanitized
from tests.native.claimed_tests import claim, release
from tests.native.sanitized import CLAIMED, KERNELS, OURS, Part, cases, collected, left_over, read_part, row_of, watched

RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at void replayssm::weighed::streamedUpdateKernel<T<(int)1>>(P)+0x59d0
=========     and Write access at void replayssm::weighed::streamedUpdateKernel<T<(int)1>>(P)+0xd4f0 [2336 hazards]
=========
..========= Warning: Race reported between Write access at void replayssm::directUpdateKernel<T>(P)+0x10
=========     and Read access at void replayssm::directUpdateKernel<T>(P)+0x90 [8 hazards]
========= Error: Race reported between Write access at void replayssm::directUpdateKernel<T>(P)+0x10
=========     and Read access at void replayssm::directUpdateKernel<T>(P)+0x90 (missing fence.proxy.async.shared)
========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect.
========= Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception.
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
MEMORY = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void replayssm::attentionKernel<replayssm::AttentionTraits<__half, 64>>(P)+0x1c0
=========     by thread (0,0,0) in block (1,0,0)
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::elementwise_kernel<4>(int)+0x50
========= Program hit cudaErrorMemoryAllocation (error 2) due to "out of memory" on CUDA API call to cudaMalloc.
=========     Saved host backtrace up to driver entry point at error
========= ERROR SUMMARY: 20 errors
========= ERROR SUMMARY: 17 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""


def parsed(tmp_path: Path, log: str) -> Part:
    return read_part(tmp_path / "results", tmp_path / "kernels", log, ended=False)


def test_every_name_of_the_list_is_a_test_and_stands_once() -> None:
    names = cases()
    assert len(set(names)) == len(names)
    assert not [n for n in names if "[" in n and n.partition("[")[0] in names], "the function has all its parameters"
    tests = collected(names)
    assert len(set(tests)) == len(tests) > 400
    assert len(cases(["test_slots.py"])) < len(names) and cases(["test_slots.py"]) != []


def test_findings_are_counted_by_kernel(tmp_path: Path) -> None:
    race, memory = parsed(tmp_path, RACE), parsed(tmp_path, MEMORY)
    assert race.ended and race.findings == {
        "Race reported: weighed::streamedUpdateKernel": 1, "Race reported: directUpdateKernel": 1,
        "Race reported (missing fence): directUpdateKernel": 1, "Internal Sanitizer Error: not in a kernel": 1,
        "Detected overflow of tracked cuda::barrier structures. Results might be incorrect.: not in a kernel": 1,
    }  # fmt: skip
    assert memory.ended and memory.findings == {
        "Invalid __global__ read: attentionKernel": 1, "not printed": 17,
        "Program hit cudaErrorMemoryAllocation (error 2): not in a kernel": 1,
    }  # fmt: skip
    assert memory.elsewhere == {"Uninitialized __global__ memory read: at::native::elementwise_kernel": 1}
    assert not parsed(tmp_path, RACE.rsplit("\n", 2)[0]).ended and not parsed(tmp_path, "killed").ended


def test_initcheck_watches_all_kernels_where_it_would_miss_others_writes() -> None:
    assert watched("initcheck", "2025.3.0.0") == watched("initcheck", "unknown") == ()
    assert watched("initcheck", "2026.4.0.0") == watched("initcheck", "2027.1.0.0") == OURS
    assert watched("memcheck", "2025.3.0.0") == OURS


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


def test_processes_share_the_tests_and_another_goes_on_behind_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of six tests fails, the fourth takes its process along, and with it the claim of the fifth."""
    started: list[list[str]] = []

    def part_of(tool: str, tests: list[str], until: float, folder: Path, library: Path) -> Part:
        claimed = [test for test in tests if claim(folder.parent, test)]
        end = next((i for i, test in enumerate(claimed) if test in ("fails", "dies")), len(claimed))
        release(folder.parent, claimed[end + 2 :])
        claimed = claimed[: end + 2]
        (folder / CLAIMED).write_text("".join(f"{test}\n" for test in claimed))
        started.append(claimed)
        ran = claimed[: end + 1] if "fails" in claimed else claimed[:end]
        return Part(outcomes={t: "failed" if t == "fails" else "passed" for t in ran}, ended=True)

    monkeypatch.setattr(sanitized, "run_part", part_of)
    tests = ["a", "fails", "b", "dies", "c", "d"]
    for workers in (1, 2):
        whole = sanitized.run_tool("memcheck", tests, workers, time.monotonic() + 60, tmp_path, Path("library"))
        assert whole.outcomes == {"a": "passed", "fails": "failed", "b": "passed", "c": "passed", "d": "passed"}
        if workers == 1:  # two deal the tests out as they come
            assert started == [["a", "fails", "b"], ["b", "dies", "c"], ["c", "d"]]
    late = sanitized.run_tool("memcheck", tests, 1, time.monotonic() - 1, tmp_path, Path("library"))
    assert late.outcomes.keys() == {"a", "fails"}, "no second process when the time is over"


def test_the_plugin_runs_each_test_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text("def test_a(): pass\ndef test_b(): assert False\ndef test_c(): pass\n")
    claim(tmp_path, "test_few.py::test_a")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "REPLAYSSM_CLAIMS": str(tmp_path),
        "REPLAYSSM_CLAIMED": str(tmp_path / CLAIMED),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.native.claimed_tests",
        "--rootdir", ".", "test_few.py",
    ]  # fmt: skip
    first = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert first.returncode == 1 and "1 failed" in first.stdout and "passed" not in first.stdout, first.stdout
    assert (tmp_path / CLAIMED).read_text().split() == ["test_few.py::test_b", "test_few.py::test_c"]
    release(tmp_path, ["test_few.py::test_c"])
    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 0 and "1 passed" in second.stdout, second.stdout
