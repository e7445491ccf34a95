"""What a run of the GPU tests came to, from its result log, as one JSON object:

    OMP_NUM_THREADS=1 python -m pytest -m gpu -n 10 --dist worksteal --result-log log.jsonl
    python -m tests.result_summary log.jsonl --json benchmarks/results/h200_gpu_tests.json

Counts by outcome and by file, each failure with the end of its report, the reasons of skips, and the machine that this
is run on, which must be the one of the tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_REPORT = 400  # characters of a failure


def summary(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of the log's lines; of a test that ran twice the last counts."""
    last = {row["test"]: row for row in rows}
    by_file: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for test, row in last.items():
        by_file[test.partition("::")[0]][row["outcome"]] += 1
    skips = Counter(row.get("why", "") for row in last.values() if row["outcome"] == "skipped")
    return {
        "what": "gpu tests", "tests": len(last),
        "outcomes": dict(sorted(Counter(row["outcome"] for row in last.values()).items())),
        "seconds_of_tests": round(sum(row["seconds"] for row in last.values()), 1),
        "failed": {t: row.get("why", "")[-_REPORT:] for t, row in sorted(last.items()) if row["outcome"] == "failed"},
        "skipped": dict(skips.most_common()),
        "files": {name: dict(sorted(counts.items())) for name, counts in sorted(by_file.items())},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the counts and writes the file; 1 when a test failed."""
    from trtllm_replayssm.bench.machine import describe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+", help="files of --result-log, the oldest first")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    lines = [line for log in options.logs for line in log.read_text(encoding="utf-8").splitlines()]
    found = {**summary(json.loads(line) for line in lines), **describe()}
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{found['tests']} tests: {found['outcomes']}")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
