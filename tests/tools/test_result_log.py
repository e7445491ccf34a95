"""The log of a test run: a line for each test that ended, also when the run is killed in the middle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.rooms import ROOT

TESTS = """
import os, time
import pytest

def test_passes(): assert os.environ.get("OMP_NUM_THREADS")
def test_fails(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="not today")
def test_skips(): pass
@pytest.fixture
def broken(): raise RuntimeError("no fixture")
def test_has_no_fixture(broken): pass
@pytest.mark.skipif("HANG" not in os.environ, reason="ends")
def test_hangs(): time.sleep(60)
"""


def start(folder: Path, *options: str, **variables: str) -> tuple[subprocess.Popen[bytes], Path]:
    (folder / "tests").mkdir()
    (folder / "tests" / "test_sample.py").write_text(TESTS)
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    (folder / "pytest.ini").write_text("[pytest]\n")
    log = folder / "log.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "--result-log", str(log)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "OMP_"))}
    variables = {**inherited, **variables, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take seconds to load
    process = subprocess.Popen([*command, *options], cwd=folder, env=variables, stdout=subprocess.DEVNULL)
    return process, log


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def outcomes(log: Path) -> dict[str, str]:
    return {line["test"].rpartition("::")[2]: line["outcome"] for line in lines(log)}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_test_has_one_line(tmp_path: Path, workers: str) -> None:
    if workers != "0":
        pytest.importorskip("xdist")
    threads = {} if workers == "2" else {"OMP_NUM_THREADS": "1"}  # workers take one by themselves
    process, log = start(tmp_path, *(["-p", "xdist.plugin", "-n", workers] if workers != "0" else []), **threads)
    assert process.wait(timeout=60) == 1
    ends = {"passes": "passed", "fails": "failed", "skips": "skipped", "has_no_fixture": "failed", "hangs": "skipped"}
    assert outcomes(log) == {f"test_{name}": outcome for name, outcome in ends.items()}
    written = lines(log)
    assert len(written) == len(ends) and all(line["seconds"] >= 0 for line in written)
    assert {bool(line["worker"]) for line in written} == {workers == "2"}
    (why,) = (line["why"] for line in written if line["test"].endswith("test_fails"))
    assert "one is not two" in why


def test_a_killed_run_leaves_the_lines_of_what_ended(tmp_path: Path) -> None:
    process, log = start(tmp_path, HANG="1", OMP_NUM_THREADS="1")
    deadline = time.monotonic() + 60
    while len(lines(log)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(outcomes(log)) == 4 and "test_hangs" not in outcomes(log)
