"""What compute-sanitizer wrote about a process that repeated calls: findings by kernel, and the first call of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from tests.native.replayed_calls import MARK

_FOUND = re.compile(
    r"={9} (?:Error: |Warning: )?((?:Internal Sanitizer Error|Detected overflow|Potential|Invalid|Misaligned"
    r"|Uninitialized|Race reported|Barrier|Program hit|Host API)[^\n]*)"
)
_KERNEL = re.compile(r"replayssm::((?:\w+::)*\w+Kernel)\b")
_UNPRINTED = re.compile(r"(\d+) (?:errors|hazards) were not printed")
_SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards? displayed)")


def findings(log: str) -> tuple[Counter[str], dict[str, str]]:
    """How many of each kind and kernel; the call that each was first seen in, "" before any."""
    found: Counter[str] = Counter()
    first: dict[str, str] = {}
    for call, message, after in _messages(log):
        kind = re.split(r" of size | at | between | due to |: ", message)[0]
        kind += " (missing fence)" if "missing fence" in f"{message} {after}" else ""
        kernel = _KERNEL.search(f"{message} {after}")
        name = f"{kind}: {kernel[1] if kernel else 'not in a kernel'}"
        found[name] += 1
        first.setdefault(name, call)
    for more in _UNPRINTED.finditer(log):
        found["not printed"] += int(more[1])
    return found, first


def ended(log: str) -> bool:
    """Whether the tool printed its summary: it has said all that it found."""
    return _SUMMARY.search(log) is not None


def _messages(log: str) -> Iterator[tuple[str, str, str]]:
    call, lines = "", log.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(MARK):
            call = line.removeprefix(MARK)
        found = _FOUND.search(line)
        if found is not None:
            yield call, found[1], lines[number + 1] if number + 1 < len(lines) else ""
