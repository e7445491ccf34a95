"""A result log in numbers: outcomes, failures with their reports, reasons of skips."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.contract.rooms import ROOT
from tests.result_summary import summary

TESTS = """
import pytest

def test_passes(): pass

def test_fails(): assert 1 + 1 == 3

@pytest.mark.skip(reason="no second GPU")
def test_is_skipped(): pass

@pytest.fixture
def broken(): raise ValueError("no memory")

def test_has_no_fixture(broken): pass
"""


def test_a_run_s_log_in_numbers(tmp_path: Path) -> None:
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    log = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--result-log", str(log), str(tmp_path)]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    found = summary(json.loads(line) for line in log.read_text().splitlines())
    assert found["tests"] == 4 and found["outcomes"] == {"failed": 2, "passed": 1, "skipped": 1}
    assert {test.split("::")[1]: why.strip().splitlines()[-1] for test, why in found["failed"].items()} == {
        "test_fails": "test_few.py:6: AssertionError", "test_has_no_fixture": "test_few.py:12: ValueError"
    }  # fmt: skip
    assert found["skipped"] == {"Skipped: no second GPU": 1}
    assert found["files"] == {"test_few.py": {"failed": 2, "passed": 1, "skipped": 1}}


def test_of_a_test_that_ran_again_the_last_counts() -> None:
    first = {"test": "a.py::t", "outcome": "failed", "seconds": 1.0, "why": "flaky"}
    found = summary([first, {**first, "outcome": "passed", "why": ""}])
    assert found["outcomes"] == {"passed": 1} and found["failed"] == {} and found["seconds_of_tests"] == 1.0
