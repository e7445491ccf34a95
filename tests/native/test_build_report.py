"""What the compiler said of every kernel for compute capability 9.0: no spill and no local memory.

Reads build/native/build.log, to which `make native` adds; the last report of a kernel counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.native import harness

LOG = harness.LIBRARY.parent / "build.log"
ENTRY = re.compile(r"Compiling entry function '([^']+)' for 'sm_(\d+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass
class Report:
    stack: int = -1
    spills: int = -1
    registers: int = 0


def reports(text: str, architecture: int) -> dict[str, Report]:
    """Of each kernel, from the lines that follow its `Compiling entry function`."""
    found: dict[str, Report] = {}
    current: Report | None = None
    for line in text.splitlines():
        if entry := ENTRY.search(line):
            current = Report()
            if int(entry[2]) == architecture:
                found[entry[1]] = current
        elif current is not None and (frame := FRAME.search(line)):
            current.stack, current.spills = int(frame[1]), int(frame[2]) + int(frame[3])
        elif current is not None and (used := REGISTERS.search(line)):
            current.registers = int(used[1])
    return found


SAMPLE = """ptxas info    : Compiling entry function 'fine' for 'sm_90'
ptxas info    : Function properties for fine
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compiling entry function 'other' for 'sm_80'
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compiling entry function 'spilling' for 'sm_90'
    24 bytes stack frame, 28 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""


def test_the_reader_sees_spills_of_its_architecture_only() -> None:
    assert reports(SAMPLE, 90) == {"fine": Report(0, 0, 40), "spilling": Report(24, 80, 255)}


@pytest.mark.skipif(not LOG.exists(), reason=f"no compiler report at {LOG}: make native")
def test_no_kernel_spills_or_uses_local_memory() -> None:
    found = reports(LOG.read_text(errors="replace"), 90)
    assert len(found) > 50, f"{LOG} reports {len(found)} kernels, not all: remove it, then make native"
    bad = {name: report for name, report in found.items() if report.stack or report.spills}
    assert not bad, bad
    assert all(0 < report.registers <= 255 for report in found.values())
