"""What a run of the tests sets up: one thread a parallel worker, GPU memory given back, a log that outlives a kill."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch and numpy are loaded: workers that each take every core wait for each other most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


class ResultLog:
    """A JSON line for each test as it ends: test, outcome, seconds with its fixtures, worker; why it did not pass."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._seconds: dict[str, float] = {}
        self._outcome: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcome.setdefault(name, (report.outcome, _why(report)))
        if report.when == "teardown":
            self._write(name, getattr(report, "worker_id", ""))

    def pytest_unconfigure(self) -> None:
        for name in list(self._seconds):  # a worker that died reports no teardown
            self._write(name, "")
        self._file.close()

    def _write(self, name: str, worker: str) -> None:
        outcome, why = self._outcome.pop(name, ("passed", ""))
        line = {"test": name, "outcome": outcome, "seconds": round(self._seconds.pop(name), 3), "worker": worker}
        self._file.write(json.dumps(line | ({"why": why[-2000:]} if why else {})) + "\n")
        self._file.flush()


def _why(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result-log", type=Path, metavar="FILE", help="append a JSON line for each test as it ends")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--result-log")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultLog(path))


@pytest.fixture(scope="module", autouse=True)
def _memory_for_the_other_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a module's tests leave in the allocator's cache goes back: workers share one GPU."""
    yield
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """What torch allocates without values holds NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
