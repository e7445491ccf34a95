"""The first README command's program: it finishes in time, prints its memory, and speculation changes no text."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.paths import EXAMPLES, ROOT

LIMIT_SECONDS = 180


@pytest.mark.slow
def test_demo_finishes_under_three_minutes_and_float32_state_gives_identical_text() -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "01_generate.py")],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < LIMIT_SECONDS
    assert "Peak memory (RSS): " in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert len(rows) == 12
    float32 = [row for row in rows if "NVFP4" not in row]
    assert len(float32) == 8
    assert all("identical" in row for row in float32), done.stdout
    two_precisions = [float(row.split("│")[-2].strip().rstrip("x")) for row in rows if "NVFP4" in row]
    assert min(two_precisions) > 4.0, "state traffic of two precisions against conventional decoding"
