"""compute-sanitizer over all native calls of a list of GPU tests: all tools beside each other.

    python -m tests.native.sanitized --calls CALLS --state STATE --json h200_sanitizer.jsonl  # on a machine with a GPU
    python -m tests.native.sanitized --calls CALLS --state STATE --tools racecheck            # one tool, or its rest

The tests of the list (`sanitized_cases.txt`: tests, or functions with all their parameters) run once, without a tool;
what they call goes into CALLS (recorded_calls.py), unless it was recorded before. Each tool then watches processes
that repeat those calls and load nothing else (replayed_calls.py): no torch, no oracle. `kernels` is no tool: torch's
profiler says which kernels each call launches. STATE keeps what came of each call, for each build of the library and
version of the tool: a run that was cut goes on where it stopped. A line a tool: calls, how many are done, those that
came out in another way or failed, what it found, by kernel, and of which library and version. Exit status 1 unless all
are done and clean. racecheck takes the build of --every-lane (see plugins/README.md) if there is one.
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
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from tests.contract.rooms import ROOT
from tests.native import harness
from tests.native.claimed_tests import claim
from tests.native.recorded_calls import FOLDER, LEFT_OUT
from tests.native.replayed_calls import KERNELS, ORDER
from tests.native.sanitizer_log import ended, findings

HERE = Path(__file__).parent
LIST = HERE / "sanitized_cases.txt"
RACES = "racecheck"
TOOLS = (RACES, "initcheck", "memcheck", "synccheck", KERNELS)
PRINTED = ("--print-limit", "20000", "--show-backtrace", "no")  # few findings hide many
BESIDE = ("--max-connections", "100")  # ports: every process of the program takes one
SLICE = 15.0  # seconds of a process: one that has to be killed says nothing of what it found
SHARES = {RACES: 3}  # processes of a tool are as many times more than the others': it takes far longer
GRACE = 5.0  # seconds that a process may take longer than it was given
RECORDED, TESTS, LAUNCHED = "recorded.json", "results.jsonl", "kernels.jsonl"


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


def digest(library: Path) -> str:
    """Says which build it was."""
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def collected(names: Sequence[str]) -> list[str]:
    """The tests behind the names, as pytest calls them."""
    paths = [name if name.startswith("tests/") else f"tests/native/{name}" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return [line for line in done.stdout.splitlines() if "::" in line]


def run(command: Sequence[str], log: Path, seconds: float, settings: Mapping[str, str]) -> int | None:
    """One process in the checkout; interrupted, then killed, when the time is over. Its status, None when killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_MODULE_LOADING": "LAZY", **settings}
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        for wait, signal_number in ((max(seconds, 0.1), signal.SIGINT), (GRACE, signal.SIGKILL)):
            try:
                return process.wait(wait)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal_number)
        process.wait()
        return None


def record(tests: Sequence[str], workers: int, until: float, calls: Path) -> dict[str, Any]:
    """Run the tests in as many processes that share them, keep their calls -> a line of the result file."""
    shutil.rmtree(calls, ignore_errors=True)
    claims = calls / "claims"
    claims.mkdir(parents=True)
    plugins = ("claimed_tests", "recorded_calls", "launched_kernels")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [word for name in plugins for word in ("-p", f"tests.native.{name}")]

    def one(share: int) -> None:
        settings = {
            "REPLAYSSM_CLAIMS": str(claims), FOLDER: str(calls), "REPLAYSSM_LAUNCHED_KERNELS": str(calls / LAUNCHED),
            "REPLAYSSM_NATIVE_LIBRARY": str(harness.LIBRARY),
        }  # fmt: skip
        results = ("--result-log", str(calls / f"{share}.{TESTS}"))
        run([*command, *results, *tests], calls / f"log{share}.txt", until - time.monotonic(), settings)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, range(workers)))
    outcomes = {row["test"]: row["outcome"] for path in calls.glob(f"*.{TESTS}") for row in rows(path)}
    left_out = Counter(row["name"] for row in rows(calls / LEFT_OUT))
    row = {
        "what": "recorded calls", "tests": len(tests), "passed": sum(o == "passed" for o in outcomes.values()),
        "failed": sorted(test for test, outcome in outcomes.items() if outcome == "failed"),
        "not_reached": sorted(set(tests) - set(outcomes)), "calls": len(list(calls.glob("*.npz"))),
        "left_out": dict(left_out), "library": digest(harness.LIBRARY),
    }  # fmt: skip
    if row["calls"] > 0:
        (calls / RECORDED).write_text(json.dumps(row) + "\n", encoding="utf-8")
    return row


def run_tool(tool: str, calls: Path, state: Path, workers: int, until: float, library: Path) -> None:
    """Repeat under the tool what no earlier run has, in `workers` processes at a time.

    state: gets a log and results for each process. A process ends at its first failure, which may have lost it the
    device, and after a while; another goes on. A call that ended one without a word is not taken up again.
    """
    state.mkdir(parents=True, exist_ok=True)
    claims = state / "claims"
    shutil.rmtree(claims, ignore_errors=True)
    claims.mkdir()
    wanted, earlier = {path.stem for path in calls.glob("*.npz")}, len(list(state.glob("*.log")))
    for name in wanted.intersection(outcomes(state, tool)):
        claim(claims, name)
    settings = {"REPLAYSSM_NATIVE_LIBRARY": str(library)}
    watch = [] if tool == KERNELS else [sanitizer(), "--tool", tool, *PRINTED, *BESIDE]

    def one(share: int) -> None:
        for attempt in count():
            left, taken = until - time.monotonic(), len(list(claims.iterdir()))
            if left <= 0 or taken >= len(wanted):
                return
            seconds, name = min(left, SLICE), f"{earlier + share:03d}.{attempt:03d}"
            arguments = ["--tool", tool, "--claims", claims, "--results", state / f"{name}.jsonl", "--seconds", seconds]
            command = [*watch, sys.executable, "-m", "tests.native.replayed_calls", str(calls), *map(str, arguments)]
            run(command, state / f"{name}.log", seconds + GRACE, settings)
            if len(list(claims.iterdir())) == taken:
                return

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, range(workers)))


def ordered(sizes: Mapping[str, int], launched: Mapping[str, Sequence[str]]) -> list[str]:
    """Calls as they are to be taken: for each kernel the smallest that launches it, then the others, the smallest
    of both first, so that most are done if the time is short.
    """
    smallest: dict[str, str] = {}
    by_size = sorted(sizes, key=lambda name: (sizes[name], name))
    for name in by_size:
        for kernel in launched.get(name, ()):
            smallest.setdefault(kernel, name)
    first = set(smallest.values())
    return sorted(by_size, key=lambda name: name not in first)


def write_order(calls: Path, names: Sequence[str]) -> None:
    """At once: processes of another version of the tool may read it."""
    written = calls / f"{ORDER}.{os.getpid()}"
    written.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    written.rename(calls / ORDER)


def outcomes(state: Path, tool: str) -> dict[str, dict[str, Any]]:
    """The lines by call: of processes whose tool has said everything."""
    return {row["call"]: row for log in told(state, tool) for row in rows(log.with_suffix(".jsonl"))}


def told(state: Path, tool: str) -> Iterator[Path]:
    """Logs of processes whose tool has said everything."""
    for log in sorted(state.glob("*.log")):
        if tool == KERNELS or ended(log.read_text(encoding="utf-8", errors="replace")):
            yield log


def rows(path: Path) -> list[dict[str, Any]]:
    """Lines of a file of JSON, none where it is not there; one that was cut off does not count."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def row_of(tool: str, calls: Path, state: Path, launched: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """A line of the result file. launched: kernels of each call, as far as that is known."""
    names = {path.stem for path in calls.glob("*.npz")}
    done = {name: row for name, row in outcomes(state, tool).items() if name in names}
    found: Counter[str] = Counter()
    first: dict[str, str] = {}
    for log in told(state, tool):
        more, seen = findings(log.read_text(encoding="utf-8", errors="replace"))
        found += more
        first = seen | first
    by_outcome = {outcome: [r for r in done.values() if r["outcome"] == outcome] for outcome in ("differs", "failed")}
    met, known = ({kernel for name in of for kernel in launched.get(name, ())} for of in (done, names))
    known |= {kernel for row in rows(calls / LAUNCHED) for kernel in row["kernels"]}  # by the tests
    row = {
        "what": "sanitizer", "tool": tool, "calls": len(names), "done": len(done),
        **{outcome: [[r["test"], r["name"], *r["why"]] for r in of] for outcome, of in by_outcome.items()},
        "findings": dict(sorted(found.items())),
        "seen_in": {kind: done[call]["test"] for kind, call in sorted(first.items()) if call in done},
        "kernels": len(met), "kernels_not_met": sorted(known - met),
        "process_seconds": round(sum(r["seconds"] for r in done.values()), 1),
    }  # fmt: skip
    return row | ({"names": sorted(met)} if tool == KERNELS else {})


def main(given: Sequence[str] | None = None) -> int:
    """Records, runs the tools beside each other and prints a line for each; 1 when one is not clean."""
    from trtllm_replayssm.bench.machine import describe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=Path, required=True, metavar="FOLDER", help="of the recorded calls")
    parser.add_argument("--state", type=Path, required=True, metavar="FOLDER", help="of what came of each call")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"of {', '.join(TOOLS)} (default: all)")
    parser.add_argument("--only", default="", help="record modules of the list, comma separated (default: all)")
    parser.add_argument("--workers", type=int, default=3, help="processes of a tool, of racecheck thrice (default 3)")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds, half of them to record (default 3600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the lines to this file")
    parser.add_argument("--every-lane", type=Path, metavar="LIBRARY", help="for racecheck: a library built for it")
    options = parser.parse_args(given)
    until, tools, machine = time.monotonic() + options.limit, options.tools.split(","), describe()
    of_tool = {tool: (options.every_lane if tool == RACES else None) or harness.LIBRARY for tool in (*tools, KERNELS)}
    program = "" if tools == [KERNELS] else version()
    state = {
        tool: options.state / f"{tool}-{digest(library)}-{'' if tool == KERNELS else program}"
        for tool, library in of_tool.items()
    }
    lines: list[dict[str, Any]] = []
    if not (options.calls / RECORDED).exists():
        tests = collected(cases([name for name in options.only.split(",") if name]))
        half = until - options.limit / 2
        lines.append(record(tests, options.workers * len(tools), half, options.calls) | machine)
        print(json.dumps(lines[-1]), flush=True)
    if KERNELS in tools:  # before the others, which go by it
        run_tool(KERNELS, options.calls, state[KERNELS], options.workers * len(tools), until, harness.LIBRARY)
    launched = {name: row.get("kernels", []) for name, row in outcomes(state[KERNELS], KERNELS).items()}
    sizes = {path.stem: path.stat().st_size for path in options.calls.glob("*.npz")}
    write_order(options.calls, ordered(sizes, launched))
    with ThreadPoolExecutor(len(tools)) as pool:
        workers = {tool: options.workers * SHARES.get(tool, 1) for tool in tools if tool != KERNELS}
        for job in [pool.submit(run_tool, tool, options.calls, state[tool], workers[tool], until, of_tool[tool])
                    for tool in workers]:  # fmt: skip
            job.result()
    for tool in tools:
        build = {"library": digest(of_tool[tool]), "every_lane_arrives": of_tool[tool] == options.every_lane}
        build |= {} if tool == KERNELS else {"sanitizer": program}
        lines.append(row_of(tool, options.calls, state[tool], launched) | build | machine)
        print(json.dumps(lines[-1]), flush=True)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    unclean = ("differs", "failed", "findings", "not_reached")
    short = [line for line in lines if line["calls"] == 0 or line.get("done", line["calls"]) < line["calls"]]
    return int(bool(short) or any(line.get(key) for line in lines for key in unclean))


if __name__ == "__main__":
    sys.exit(main())
