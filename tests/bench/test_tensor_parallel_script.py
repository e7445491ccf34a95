"""The script that times steps over several GPUs, where there is none."""

from __future__ import annotations

import runpy
import sys

import pytest

from tests.paths import ROOT


def test_without_a_gpu_it_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "benchmarks" / "tensor_parallel_step.py"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(script), "qwen3.5-4b"])
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):  # as torchrun sets them
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))["main"]()
    message = str(ended.value.code)
    assert "\n" not in message and message.startswith("tensor_parallel_step: session: device: expected")
