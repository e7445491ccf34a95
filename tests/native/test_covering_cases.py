"""The choice of cases that launch every kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.native.covering_cases import covering, main

LAUNCHED = {"f[a]": ["x"], "f[b]": ["x", "y"], "f[c]": ["z"], "g[a]": ["y", "z"], "g[b]": ["z"], "h": []}
SECONDS = {"f[a]": 1.0, "f[b]": 5.0, "f[c]": 2.0, "g[a]": 3.0, "g[b]": 0.1, "h": 0.0}


def test_every_kernel_and_every_function_is_there_the_dearest_first() -> None:
    assert covering(LAUNCHED, SECONDS) == ["g[a]", "f[a]", "g[b]", "h"]
    assert covering(LAUNCHED, {**SECONDS, "g[a]": 9.0}) == ["f[b]", "f[a]", "g[b]", "h"]


def test_only_what_passed_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels, results = tmp_path / "kernels", tmp_path / "results"
    kernels.write_text(
        "".join(json.dumps({"test": f"tests/native/{t}", "kernels": k}) + "\n" for t, k in LAUNCHED.items())
    )
    results.write_text(
        "".join(
            json.dumps({"test": f"tests/native/{t}", "seconds": s, "outcome": "failed" if t == "g[a]" else "passed"})
            + "\n"
            for t, s in SECONDS.items()
        )
    )
    assert main([str(kernels), str(results)]) == 0
    assert capsys.readouterr().out.split() == ["f[b]", "f[a]", "g[b]", "h"]
