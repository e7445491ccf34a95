"""The list for compute-sanitizer names tests that exist, and what the tool says is counted by kernel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.contract.rooms import ROOT
from tests.native.claimed_tests import claim, claim_of
from tests.native.sanitized import (
    LAUNCHED,
    RACES,
    cases,
    collected,
    ordered,
    outcomes,
    row_of,
    rows,
    run_tool,
    version,
    write_order,
)
from tests.native.sanitizer_log import ended, findings
from tests.native.test_recorded_calls import Machine

RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at void replayssm::weighed::streamedUpdateKernel<T<(int)1>>(P)+0x59d0
=========     and Write access at void replayssm::weighed::streamedUpdateKernel<T<(int)1>>(P)+0xd4f0 [2336 hazards]
=========
CALL b
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


def test_every_name_of_the_list_is_a_test_and_stands_once() -> None:
    names = cases()
    assert len(set(names)) == len(names)
    assert not [n for n in names if "[" in n and n.partition("[")[0] in names], "the function has all its parameters"
    tests = collected(names)
    assert len(set(tests)) == len(tests) > 400
    assert len(cases(["test_slots.py"])) < len(names) and cases(["test_slots.py"]) != []


def test_findings_are_counted_by_kernel() -> None:
    race, seen = findings(RACE)
    assert ended(RACE) and race == {
        "Race reported: weighed::streamedUpdateKernel": 1, "Race reported: directUpdateKernel": 1,
        "Race reported (missing fence): directUpdateKernel": 1, "Internal Sanitizer Error: not in a kernel": 1,
        "Detected overflow of tracked cuda::barrier structures. Results might be incorrect.: not in a kernel": 1,
    }  # fmt: skip
    assert (
        seen["Race reported: weighed::streamedUpdateKernel"] == "" and seen["Race reported: directUpdateKernel"] == "b"
    )
    memory, _ = findings(MEMORY)
    assert ended(MEMORY) and memory == {
        "Invalid __global__ read: attentionKernel": 1, "not printed": 17,
        "Uninitialized __global__ memory read: not in a kernel": 1,
        "Program hit cudaErrorMemoryAllocation (error 2): not in a kernel": 1,
    }  # fmt: skip
    assert not ended(RACE.rsplit("\n", 2)[0]) and not ended("killed")


def test_a_line_says_what_a_tool_came_to(tmp_path: Path) -> None:
    """One process said everything, another was killed: its calls count as not done."""
    calls, state = tmp_path / "calls", tmp_path / "state"
    calls.mkdir()
    state.mkdir()
    for name in "abcd":
        (calls / f"{name}.npz").touch()
    outcomes = {"a": ("equal", []), "b": ("differs", ["out: 1 of 2"]), "old": ("equal", [])}
    lines = [json.dumps({"call": call, "test": f"test_{call}", "name": "rssm_draw", "outcome": outcome, "why": why,
                         "seconds": 0.25}) + "\n" for call, (outcome, why) in outcomes.items()]  # fmt: skip
    (state / "000.000.jsonl").write_text("".join(lines) + '{"call": "cut o')
    (state / "000.000.log").write_text(RACE)
    (state / "001.000.jsonl").write_text(lines[0].replace('"a"', '"c"'))
    (state / "001.000.log").write_text("killed")
    (calls / LAUNCHED).write_text('{"test": "test_a", "kernels": ["x", "captured"]}\n')
    row = row_of(RACES, calls, state, {"a": ["x", "y"], "b": ["y"], "c": ["z"]})
    assert (row["calls"], row["done"], row["process_seconds"]) == (4, 2, 0.5)
    assert row["differs"] == [["test_b", "rssm_draw", "out: 1 of 2"]] and row["failed"] == []
    assert row["kernels"] == 2 and row["kernels_not_met"] == ["captured", "z"]
    assert row["findings"]["Race reported: directUpdateKernel"] == 1
    assert row["seen_in"]["Race reported: directUpdateKernel"] == "test_b"


def test_one_call_of_each_kernel_comes_first() -> None:
    sizes = {"big": 9, "middle": 5, "small": 1, "tiny": 0, "unknown": 3}
    launched = {"big": ["x", "y"], "middle": ["x"], "small": ["z"], "tiny": ["z"]}
    assert ordered(sizes, launched) == ["tiny", "middle", "big", "small", "unknown"]
    assert ordered(sizes, {}) == ["tiny", "small", "unknown", "middle", "big"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_run_that_was_cut_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    state, library = tmp_path / "state", Path(machine.environment["REPLAYSSM_NATIVE_LIBRARY"])

    def run(seconds: float) -> None:
        run_tool("memcheck", machine.calls, state, 2, time.monotonic() + seconds, library)

    run(-1.0)
    assert outcomes(state, "memcheck") == {}
    write_order(machine.calls, ordered({path.stem: 0 for path in machine.calls.glob("*.npz")}, {}))
    run(60.0)
    [log, *others] = sorted(state.glob("*.log"))
    assert len(others) == 1, "two processes share the calls"
    first = outcomes(state, "memcheck")
    assert len(first) == 11 and sum(len(rows(path)) for path in state.glob("*.jsonl")) == 11
    log.write_text("killed")
    again = {row["call"] for row in rows(log.with_suffix(".jsonl"))}
    assert outcomes(state, "memcheck").keys() == first.keys() - again
    run(60.0)
    assert outcomes(state, "memcheck").keys() == first.keys()
    assert {row["call"] for path in state.glob("00[2-9].*.jsonl") for row in rows(path)} == again
    assert version() == "2025.3.1.0"


def test_the_plugin_runs_each_test_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text("def test_a(): pass\ndef test_b(): assert False\ndef test_c(): pass\n")
    claim(tmp_path, "test_few.py::test_a")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPLAYSSM_CLAIMS": str(tmp_path)}
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.native.claimed_tests",
        "--rootdir", ".", "test_few.py",
    ]  # fmt: skip
    first = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert first.returncode == 1 and "1 failed" in first.stdout and "passed" not in first.stdout, first.stdout
    claim_of(tmp_path, "test_few.py::test_c").unlink()  # it was taken with the one before it
    second = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 0 and "1 passed" in second.stdout, second.stdout
