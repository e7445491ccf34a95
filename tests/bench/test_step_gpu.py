"""`bench step` on a GPU: slices of the presets run as graphs, parts add up, plans hold, experts included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.native import harness
from trtllm_replayssm.cli import main
from trtllm_replayssm.runtime.planner import LIBRARY_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]


@pytest.mark.parametrize(
    ("preset", "layers", "parts"),
    [
        ("nemotron-3-nano-4b", "10-13", {"SSM", "convolution", "attention", "GEMM", "other"}),
        ("qwen3.5-4b", "0-3", {"SSM", "convolution", "attention", "GEMM", "other"}),
        ("nemotron-3-super-120b-a12b-nvfp4", "0-1", {"SSM", "convolution", "experts", "GEMM", "other"}),
        ("qwen3.5-122b-a10b-nvfp4", "3-4", {"SSM", "convolution", "attention", "experts", "GEMM", "other"}),
    ],
)
def test_a_slice_is_measured_with_both_caches(preset: str, layers: str, parts: set[str], tmp_path: Path) -> None:
    lines = tmp_path / "steps.jsonl"
    code = main(
        ["bench", "step", preset, "--layers", layers, "--batch", "32", "--tokens", "1,3", "--rounds", "2",
         "--breakdown", "32", "--forced-acceptance", "2.5", "--json", str(lines)]
    )  # fmt: skip
    assert code == 0
    steps = [row for row in map(json.loads, lines.read_text().splitlines()) if row["what"] == "step"]
    assert [(r["cache"], r["T"]) for r in steps] == [(c, t) for t in (1, 3) for c in ("conventional", "replay")]
    for row in steps:
        assert {part for part, us in row["breakdown_us"].items() if us > 0} == parts
        # another process may share the GPU, which lengthens steps but not kernels
        assert 0.0 < sum(row["breakdown_us"].values()) / row["us"] < 1.3
        assert row["floor_us"] < row["us"] and row["gpu"] == torch.cuda.get_device_name()
        # an upper bound, with the libraries' workspaces and tables that the plan holds in reserve
        assert row["peak_bytes"] < row["planned_bytes"] + LIBRARY_BYTES
