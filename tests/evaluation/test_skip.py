"""What the measurement of skipped checkpoints counts as faded, and how it reads a profile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.session.sessions import CPU
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.ops.reference.mamba2 import mamba2_update
from trtllm_replayssm.runtime.evaluation import skip_problem
from trtllm_replayssm.runtime.evaluation.skip_cost import add_counters
from trtllm_replayssm.runtime.evaluation.skip_problem import SkipCase, SkipProblem, even_case, measured_case
from trtllm_replayssm.runtime.evaluation.tables import table
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.decay_skip import faded

WINDOW = 4


class Reference:
    """The reference operations in place of the native library; `reads`: what the skipping one makes of skip_below."""

    def __init__(self, reads: Any) -> None:
        self._reads = reads

    def unsupported(self, *_: Any) -> None:
        return None

    def mamba2_update(self, *tokens: Any, skip_below: float | None, **more: Any) -> torch.Tensor:
        return mamba2_update(*tokens, **more, skip_below=self._reads(skip_below))


def problem_by(monkeypatch: pytest.MonkeyPatch, reads: Any) -> SkipProblem:
    monkeypatch.setattr(skip_problem, "find_library", lambda: Path("some"))
    monkeypatch.setattr(skip_problem, "load_library", lambda path: None)
    monkeypatch.setattr(skip_problem, "NativeOps", lambda library, device: Reference(reads))
    return SkipProblem(ssm_shape(SsmKind.MAMBA2, heads=4, groups=2, head_dim=8, state_dim=16), 3, WINDOW, CPU)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("h", [0, 2, WINDOW])
def test_equal_bits_are_found_and_the_checkpoints_left_as_they_were(
    h: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_by(monkeypatch, lambda below: below)
    before = problem._state.checkpoint.data.clone()
    assert problem.equal_bits(even_case(3, 4, WINDOW, share, 2.0**-9, CPU), h)
    assert torch.equal(problem._state.checkpoint.data, before)


@pytest.mark.parametrize("h", [2, WINDOW])
def test_one_that_reads_what_it_should_skip_is_found(h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_by(monkeypatch, lambda below: None)
    assert not problem.equal_bits(even_case(3, 4, WINDOW, 0.5, 2.0**-9, CPU), h)
    assert problem.equal_bits(even_case(3, 4, WINDOW, 0.0, 2.0**-9, CPU), h), "nothing to skip"


def test_a_sum_next_to_the_threshold_is_not_clear() -> None:
    decays = torch.full((1, WINDOW + 1, 2), math.log(2.0**-9) / (WINDOW + 1))
    decays[..., 1] = 0.0
    case = SkipCase("near", decays, 2.0**-9)
    assert [case.is_clear(h, WINDOW) for h in (0, 3, WINDOW - 1, WINDOW)] == [True] * 4
    assert not SkipCase("at", decays, 2.0 ** (-9 * WINDOW / (WINDOW + 1))).is_clear(WINDOW, WINDOW)


def test_the_made_up_share_of_heads_fades_from_the_first_record_on() -> None:
    case = even_case(3, 8, WINDOW, 0.25, 2.0**-9, CPU)
    assert [float(case.faded(h, WINDOW).float().mean()) for h in range(WINDOW + 1)] == [0.25] * 5


def test_real_windows_fade_by_the_rule_of_the_specification() -> None:
    """Each row is a stretch of one layer's and text's decays; a flush does not count the step's token."""
    rng = np.random.default_rng(0)
    series = torch.from_numpy(-rng.exponential(1.0, (40, 2, 3, 4)))
    case = measured_case("real", series, 50, WINDOW, 2.0**-4, CPU)
    stretches = {
        tuple(series[start : start + WINDOW + 1, layer, text].float().flatten().tolist())
        for start in range(40 - WINDOW)
        for layer in range(2)
        for text in range(3)
    }
    assert all(tuple(row.flatten().tolist()) in stretches for row in case.log_decays)
    shares = []
    for h in range(WINDOW + 1):
        seen = case.log_decays[:, : h + 1 if h < WINDOW else h].double().numpy()
        want = np.stack([faded(list(row), 2.0**-4) for row in seen])
        near = np.abs(seen.sum(1) - math.log(2.0**-4)) < 1e-5
        assert (case.faded(h, WINDOW).numpy() == want)[~near].all() and near.mean() < 0.05
        shares.append(want.mean())
    assert shares[0] < shares[3] and shares[3] == shares[4]


def profile(kernels: list[str], reads: list[str], unit: str = "Mbyte") -> str:
    """As `ncu --csv --page raw` prints it, behind what the program prints."""
    head = '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"'
    lines = [f'"{i}","{k}","{r}","1.5"' for i, (k, r) in enumerate(zip(kernels, reads, strict=True))]
    return "\n".join(["==PROF== something", head, f'"","","{unit}","{unit}"', *lines, ""])


def row(**more: Any) -> dict[str, Any]:
    return {
        "shape": "a", "case": "c", "h": 8, "flushes": False, "faded": 0.5, "state_bytes": 2_000_000, "plain_us": 9.0,
        "skipping_us": 6.0, **more,
    }  # fmt: skip


def test_counters_go_to_the_rows_in_order(tmp_path: Path) -> None:
    path, rows = tmp_path / "counters.csv", [row(), row(h=16, flushes=True)]
    names = ["void streamedUpdateKernel<x>", "void skippingStreamedKernel<x>"] * 2
    path.write_text(profile(names, ["2.0", "1,001.25", "3", "4"]))
    add_counters(rows, path)
    assert [r["plain_read_bytes"] for r in rows] == [2_000_000, 3_000_000]
    assert [r["skipping_read_bytes"] for r in rows] == [1_001_250_000, 4_000_000]
    assert rows[0]["plain_write_bytes"] == 1_500_000
    lines = table({"what": "skip", "rows": rows})
    assert lines[2] == "| a | c | 8 | 50 % | 2 | 2 / 1001 | 9 / 6 |  |" and "16, flush" in lines[3]


@pytest.mark.parametrize("kernels", [[], ["streamed"], ["skippingX", "streamed"], ["streamed", "skippingX"] * 2])
def test_a_profile_of_other_launches_is_refused(kernels: list[str], tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_text(profile(kernels, ["1"] * len(kernels)) if kernels else "no profile")
    with pytest.raises(ConfigError, match="plain and skipping in turn"):
        add_counters([row()], path)


def test_without_counters_the_table_has_times_only() -> None:
    assert table({"what": "skip", "rows": [row()]})[2].endswith("| 2 |  | 9 / 6 |  |")


@pytest.mark.parametrize(("equal", "cell"), [(True, "equal"), (False, "DIFFER"), (None, "")])
def test_the_table_says_whether_the_bits_were_equal(equal: bool | None, cell: str) -> None:
    assert table({"what": "skip", "rows": [row(equal_bits=equal)]})[2].endswith(f"| {cell} |")
