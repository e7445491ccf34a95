"""Which tests of compute-sanitizer's list suffice: together they launch every kernel that the list does, cheaply.

    python -m tests.native.covering_cases KERNELS RESULTS > tests/native/sanitized_cases.txt

KERNELS, RESULTS: kernels.jsonl and all *.results.jsonl, put together, of the --calls of `tests.native.sanitized`. Every
test function stays in with its cheapest case: it goes a way of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


def covering(launched: Mapping[str, Collection[str]], seconds: Mapping[str, float]) -> list[str]:
    """The tests, the most expensive first, so that processes that share them end together.

    launched: kernels of each test. seconds: of each test. The cheapest of every function, then again and again the test
    with most new kernels for its time.
    """
    cost = {test: seconds.get(test, 0.0) + 0.05 for test in launched}  # a test is never for nothing
    cheapest: dict[str, str] = {}
    for test in sorted(launched, key=lambda test: cost[test]):
        cheapest.setdefault(test.partition("[")[0], test)
    kept = list(cheapest.values())
    missing = set().union(*launched.values()).difference(*(launched[test] for test in kept))
    while missing:
        best = max(launched, key=lambda test: len(missing.intersection(launched[test])) / cost[test])
        kept.append(best)
        missing.difference_update(launched[best])
    return sorted(kept, key=lambda test: -cost[test])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("results", type=Path)
    options = parser.parse_args(arguments)
    passed = {row["test"]: row["seconds"] for row in _rows(options.results) if row["outcome"] == "passed"}
    launched = {row["test"]: row["kernels"] for row in _rows(options.kernels) if row["test"] in passed}
    for test in covering(launched, passed):
        print(test.removeprefix("tests/native/"))
    return 0


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
