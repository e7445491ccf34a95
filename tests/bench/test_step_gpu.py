"""`bench step` on a GPU: slices of the presets run as graphs, parts add up, plans hold, experts included.

Another process may share the GPU: it lengthens steps, single kernels and a copy, each at its own time. So nothing here
compares two such measurements; the bounds are the device's, and the shortest run of each kernel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.native import harness
from trtllm_replayssm.bench.step import breakdown
from trtllm_replayssm.bench.step.breakdown import Interval, alone
from trtllm_replayssm.cli import main
from trtllm_replayssm.runtime.planner import LIBRARY_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

STEPS = 16  # profiled: one window
Traces = list[list[Interval]]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Traces:
    """The kernels of every profile, in order of beginning."""
    found: Traces = []

    def recorded(kernels: Sequence[Interval]) -> list[tuple[str, float]]:
        found.append(sorted(kernels, key=lambda kernel: kernel[1:]))
        return alone(kernels)

    monkeypatch.setattr(breakdown, "alone", recorded)
    return found


def shortest_step(trace: list[Interval]) -> float:
    """Microseconds of a step in which every kernel takes the least that it took in any, without gaps."""
    kernels = alone(trace)
    count, rest = divmod(len(kernels), STEPS)
    assert rest == 0 and count > 0, "steps of one graph have the same kernels"
    return sum(min(us for _, us in kernels[i::count]) for i in range(count))


def device_rate() -> float:
    """Bytes a second that no kernel exceeds: two transfers a clock over the whole bus."""
    device = torch.cuda.get_device_properties()
    return 2 * device.memory_clock_rate * 1e3 * device.memory_bus_width / 8


@pytest.mark.parametrize(
    ("preset", "layers", "parts"),
    [
        ("nemotron-3-nano-4b", "10-13", {"SSM", "convolution", "attention", "GEMM", "other"}),
        ("qwen3.5-4b", "0-3", {"SSM", "convolution", "attention", "GEMM", "other"}),
        ("nemotron-3-super-120b-a12b-nvfp4", "0-1", {"SSM", "convolution", "experts", "GEMM", "other"}),
        ("qwen3.5-122b-a10b-nvfp4", "3-4", {"SSM", "convolution", "attention", "experts", "GEMM", "other"}),
    ],
)
def test_a_slice_is_measured_with_both_caches(
    preset: str, layers: str, parts: set[str], traces: Traces, tmp_path: Path
) -> None:
    lines = tmp_path / "steps.jsonl"
    code = main(
        ["bench", "step", preset, "--layers", layers, "--batch", "32", "--tokens", "1,3", "--rounds", "2",
         "--breakdown", "32", "--forced-acceptance", "2.5", "--json", str(lines)]
    )  # fmt: skip
    assert code == 0
    steps = [row for row in map(json.loads, lines.read_text().splitlines()) if row["what"] == "step"]
    assert [(r["cache"], r["T"]) for r in steps] == [(c, t) for t in (1, 3) for c in ("conventional", "replay")]
    for row, trace in zip(steps, traces, strict=True):
        assert {part for part, us in row["breakdown_us"].items() if us > 0} == parts
        spent = sum(us for _, us in alone(trace)) / STEPS
        assert sum(row["breakdown_us"].values()) == pytest.approx(spent, abs=0.05)  # parts are rounded
        assert 0.0 < shortest_step(trace) < 1.1 * row["us"]
        assert sum(row["floor_bytes"].values()) / device_rate() < row["us"] * 1e-6
        assert row["gpu"] == torch.cuda.get_device_name()
        # an upper bound, with the libraries' workspaces and tables that the plan holds in reserve
        assert row["peak_bytes"] < row["planned_bytes"] + LIBRARY_BYTES
