"""compute-sanitizer over a list of GPU tests that launches every kernel of the library: all tools, several processes.

    python -m tests.native.sanitized --workers 12 --json h200_sanitizer.jsonl     # on a machine with a GPU
    python -m tests.native.sanitized --tools racecheck --only test_update.py      # a part of it

The list (`sanitized_cases.txt`: tests, or functions with all their parameters) is of small shapes; results are
compared as usual. Tools: memcheck, racecheck and synccheck over this library's kernels, initcheck too where the version
sees the writes of other libraries' all the same (2026.4), else over all kernels; and `kernels`, which is no tool: which
kernels the cases launch, by torch's profiler. A line a tool: cases, those that passed, failed or were not reached, what
it found, by kernel, what it found in other libraries' kernels, which library and which version of the tool it was. Exit
status 1 when it found any in ours. racecheck takes the build of --every-lane (see plugins/README.md) if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.contract.rooms import ROOT
from tests.native import harness
from tests.native.claimed_tests import claim_of, release

HERE = Path(__file__).parent
LIST = HERE / "sanitized_cases.txt"
KERNELS, RACES, CLAIMED = "kernels", "racecheck", "claimed.txt"
OURS = ("--kernel-name", "kns=replayssm")
INITIALISED, SEES_OTHERS = "initcheck", (2026, 4)
TOOLS = ("memcheck", RACES, "synccheck", INITIALISED, KERNELS)
PRINTED = ("--print-limit", "20000", "--show-backtrace", "no")  # a finding in ours may come after many in others
BESIDE = ("--max-connections", "100")  # ports: every process of the program takes one
_FOUND = re.compile(  # perhaps behind pytest's dots
    r"={9} (?:Error: |Warning: )?((?:Internal Sanitizer Error|Detected overflow|Potential|Invalid|Misaligned"
    r"|Uninitialized|Race reported|Barrier|Program hit)[^\n]*)"
)
_KERNEL = re.compile(r"replayssm::((?:\w+::)*\w+Kernel)\b")
_OTHER = re.compile(r"^=+ +at (?:void )?((?:\w+::)*\w+)")
_UNPRINTED = re.compile(r"(\d+) (?:errors|hazards) were not printed")
_SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards? displayed)")


@dataclass
class Part:
    """What a process with a share of the cases reported."""

    outcomes: dict[str, str] = field(default_factory=dict)
    findings: Counter[str] = field(default_factory=Counter)
    elsewhere: Counter[str] = field(default_factory=Counter)  # in other libraries' kernels
    kernels: set[str] = field(default_factory=set)
    ended: bool = False  # the tool printed its summary

    def add(self, other: Part) -> None:
        """What another process reported."""
        self.outcomes |= other.outcomes
        self.findings += other.findings
        self.elsewhere += other.elsewhere
        self.kernels |= other.kernels
        self.ended &= other.ended


def cases(only: Sequence[str] = ()) -> list[str]:
    """Names of the list, below this folder; of the named modules alone."""
    lines = LIST.read_text(encoding="utf-8").split("\n")
    return [line for line in lines if line and (not only or line.partition("::")[0] in only)]


def sanitizer() -> str:
    """The program. Exits with a line that says where it is not."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        sys.exit(f"compute-sanitizer: not on the PATH, and no {found}")
    return found


def version() -> str:
    """Of the program, as it says it."""
    said = subprocess.run([sanitizer(), "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Version (\d[\d.]*)", said)
    return found[1] if found else "unknown"


def watched(tool: str, program: str) -> tuple[str, ...]:
    """Options that say which kernels a tool of that version watches."""
    numbers = tuple(int(part) for part in program.split(".")[:2] if part.isdigit())
    return () if tool == INITIALISED and numbers < SEES_OTHERS else OURS


def collected(names: Sequence[str]) -> list[str]:
    """The tests behind the names, as pytest calls them."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *_paths(names)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return [line for line in done.stdout.splitlines() if "::" in line]


def _paths(names: Sequence[str]) -> list[str]:
    return [name if name.startswith("tests/") else f"tests/native/{name}" for name in names]


def run_part(tool: str, tests: Sequence[str], until: float, folder: Path, library: Path) -> Part:
    """One process over those of the tests that no other takes; interrupted when the time is over. `folder` gets its
    log, the folder above it the claims.
    """
    results, launched, log = (folder / name for name in ("results.jsonl", "kernels.jsonl", "log.txt"))
    if until <= time.monotonic():
        return Part()
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.native.claimed_tests",
        "--result-log", str(results), *tests,
    ]  # fmt: skip
    if tool == KERNELS:
        command[3:3] = ["-p", "tests.native.launched_kernels"]
    else:
        kernels = watched(tool, version())
        command = [sanitizer(), "--tool", tool, *kernels, *PRINTED, *BESIDE, "--error-exitcode", "9", *command]
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "REPLAYSSM_LAUNCHED_KERNELS": str(launched),
        "REPLAYSSM_CLAIMS": str(folder.parent), "REPLAYSSM_CLAIMED": str(folder / CLAIMED),
        "REPLAYSSM_NATIVE_LIBRARY": str(library),
    }  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return read_part(results, launched, log.read_text(errors="replace"), ended=tool == KERNELS)


def read_part(results: Path, launched: Path, log: str, *, ended: bool) -> Part:
    """What a process left behind."""
    part = Part(ended=ended or _SUMMARY.search(log) is not None)
    for line in results.read_text().splitlines() if results.exists() else ():
        row = json.loads(line)
        part.outcomes[row["test"]] = row["outcome"]
    for line in launched.read_text().splitlines() if launched.exists() else ():
        part.kernels |= set(json.loads(line)["kernels"])
    for message, after in _messages(log):
        kind = re.split(r" of size | at | between | due to |: ", message)[0]
        kind += " (missing fence)" if "missing fence" in f"{message} {after}" else ""
        ours, other = _KERNEL.search(f"{message} {after}"), _OTHER.search(after)
        if ours is None and other is not None:
            part.elsewhere[f"{kind}: {other[1]}"] += 1
        else:
            part.findings[f"{kind}: {ours[1] if ours else 'not in a kernel'}"] += 1
    for more in _UNPRINTED.finditer(log):
        part.findings["not printed"] += int(more[1])
    return part


def _messages(log: str) -> Iterator[tuple[str, str]]:
    lines = log.splitlines()
    for number, line in enumerate(lines):
        found = _FOUND.search(line)
        if found is not None:
            yield found[1], lines[number + 1] if number + 1 < len(lines) else ""


def run_tool(tool: str, tests: Sequence[str], workers: int, until: float, logs: Path, library: Path) -> Part:
    """All of them under one tool, in `workers` processes at a time that share the tests.

    A process ends at its first failure, which may have lost it the device; another goes on. A test that ended one
    without a word counts as not reached; one that it had only taken is given back.
    """
    claims = logs / tool
    shutil.rmtree(claims, ignore_errors=True)

    def one(share: int) -> Part:
        mine = Part(ended=True)
        for attempt in count():
            if attempt > 0 and all(claim_of(claims, test).exists() for test in tests):
                return mine
            folder = claims / f"{share}.{attempt}"
            folder.mkdir(parents=True)
            part = run_part(tool, tests, until, folder, library)
            mine.add(part)
            names = folder / CLAIMED
            claimed = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
            idle = [test for test in claimed if test not in part.outcomes]
            release(claims, idle if "failed" in part.outcomes.values() else idle[1:])
            if not claimed or until <= time.monotonic():
                return mine
        raise AssertionError("count() does not end")

    whole = Part(ended=True)
    with ThreadPoolExecutor(workers) as pool:
        for part in pool.map(one, range(min(workers, len(tests)))):
            whole.add(part)
    return whole


def row_of(tool: str, tests: Sequence[str], whole: Part, machine: dict[str, Any]) -> dict[str, Any]:
    """A line of the result file."""
    passed = [t for t, outcome in whole.outcomes.items() if outcome == "passed"]
    row = {
        "what": "sanitizer", "tool": tool, "cases": len(tests), "passed": len(passed),
        "skipped": sum(outcome == "skipped" for outcome in whole.outcomes.values()),
        "failed": sorted(t for t, outcome in whole.outcomes.items() if outcome == "failed"),
        "not_reached": sorted(set(tests) - set(whole.outcomes)), "ended": whole.ended,
        "findings": dict(sorted(whole.findings.items())), "elsewhere": dict(sorted(whole.elsewhere.items())), **machine,
    }  # fmt: skip
    return row | ({"kernels": len(whole.kernels), "names": sorted(whole.kernels)} if tool == KERNELS else {})


def digest(library: Path) -> str:
    """Says which build it was."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def left_over(results: Path, tool: str, tests: Sequence[str]) -> list[str]:
    """The tests that the tool's last line of a result file did not reach; all where it has none."""
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    reached = [set(row["not_reached"]) for row in rows if row["tool"] == tool]
    return [test for test in tests if not reached or test in reached[-1]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tools one after the other and prints a line for each; 1 when one found something or a case failed."""
    from trtllm_replayssm.bench.machine import describe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument("--only", default="", help="modules of the list, comma separated (default: all)")
    parser.add_argument("--workers", type=int, default=8, help="processes at once (default 8)")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each tool (default 3600)")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs (default: none)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the lines to this file")
    parser.add_argument("--rest", type=Path, metavar="FILE", help="only what a tool's last line there did not reach")
    parser.add_argument("--last-first", action="store_true", help="the cheap cases first, for a tool that may not end")
    parser.add_argument("--every-lane", type=Path, metavar="LIBRARY", help="for racecheck: a library built for it")
    options = parser.parse_args(arguments)
    tests, clean = collected(cases([name for name in options.only.split(",") if name])), True
    with tempfile.TemporaryDirectory() as scratch:
        for tool in options.tools.split(","):
            chosen = tests if options.rest is None else left_over(options.rest, tool, tests)
            chosen = chosen[::-1] if options.last_first else chosen
            until = time.monotonic() + options.limit
            library = options.every_lane if tool == RACES and options.every_lane else harness.LIBRARY
            whole = run_tool(tool, chosen, options.workers, until, options.logs or Path(scratch), library)
            of = {"library": digest(library), "every_lane_arrives": library == options.every_lane}
            of |= {} if tool == KERNELS else {"sanitizer": version()}
            row = row_of(tool, chosen, whole, of | describe())
            clean &= not row["findings"] and not row["failed"] and not row["not_reached"] and row["ended"]
            print(json.dumps({**row, "names": None, "not_reached": len(row["not_reached"])}), flush=True)
            if options.json is not None:
                with options.json.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(row) + "\n")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
