"""`bench step` end to end on a CPU: both caches of a small checkpoint, JSON lines, and the figure from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.bench.step.plot import draw_steps, read_rows
from trtllm_replayssm.bench.step.report import Row
from trtllm_replayssm.cli import main

SMALL = str(CHECKPOINTS / "qwen-moe")


def shape_bound(row: Row, products: Row) -> float:
    """Of a step, from what its file says: its products' times, and all other bytes at the rate of its floor."""
    own = [p for p in products["products"] if p["tokens"] == row["B"] * row["T"]]
    moved = sum(row["floor_bytes"].values())
    others = moved - sum(p["count"] * p["bytes"] for p in own)
    return sum(p["count"] * p["bound_us"] for p in own) + others / moved * row["floor_us"]


def test_both_caches_are_measured_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "steps.jsonl"
    code = main(
        ["bench", "step", SMALL, "--device", "cpu", "--activation", "float32", "--batch", "1,3", "--tokens", "1,2",
         "--window", "4", "--rounds", "1", "--context", "40", "--forced-acceptance", "1.5", "--breakdown", "none",
         "--json", str(lines)]
    )  # fmt: skip
    assert code == 0
    rows = read_rows(lines)
    steps = [row for row in rows if row["what"] == "step"]
    assert [(r["cache"], r["T"], r["B"]) for r in steps] == [
        (cache, tokens, batch) for tokens in (1, 2) for cache in ("conventional", "replay") for batch in (1, 3)
    ]
    assert all(r["us"] > 0 and r["floor_us"] > 0 and r["commit"] and r["layers"] == "all" for r in steps)
    for row in steps:  # rounded to tenths, times to hundredths
        rate = row["B"] * row["accepted"] / row["us"] * 1e6
        assert row["tokens_per_s"] == pytest.approx(rate, rel=1e-5, abs=0.051)
    for row in steps:
        assert row["shape_bound_us"] == pytest.approx(shape_bound(row, rows[0]), rel=1e-3)  # of rounded numbers
        assert row["percent_of_shape_bound"] == pytest.approx(100 * row["shape_bound_us"] / row["us"], abs=0.051)
    assert all(row["shape_bound_ratio"] > 0 for row in rows if "bound_ratio" in row)
    names = {row["row"] for row in rows if row["what"] == "ratio"}
    assert names == {"plain", "speculative", "speculative replay over plain conventional",
                     "slot bytes, conventional over replay"}
    printed = capsys.readouterr().out
    assert "products of 6 tokens alone" in printed and "% at its shapes" in printed
    assert "of the byte floor" in printed
    assert main(["bench", "plot", str(lines)]) == 0
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if line not in printed] == []


def test_the_figure_is_made_from_the_lines_again_byte_for_byte(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shared = {"what": "step", "model": "m", "layers": "0-7", "L": 16, "gpu": "a GPU", "B": 256, "floor_us": 600.0}
    rows = [
        {**shared, "cache": "replay", "T": 1, "us": 1000.0, "breakdown_us": {"SSM": 500.0, "GEMM": 400.0}},
        {**shared, "cache": "conventional", "T": 1, "us": 1500.0, "breakdown_us": {"SSM": 1000.0, "GEMM": 400.0}},
    ]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    assert draw_steps(rows, first) and draw_steps(read_rows(lines), second)
    assert first.read_bytes() == second.read_bytes()
    assert not draw_steps([{**rows[0], "breakdown_us": {}}], tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


@pytest.mark.parametrize(
    "text", ["no json", "[1]", '{"what": "update"}', "{}", pytest.param("[" * 100_000, id="nested without end")]
)
def test_other_files_are_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(text + "\n")
    assert main(["bench", "plot", str(other)]) == 1
    assert "bench step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--batch", "0"], "--batch"), (["--tokens", "one"], "--tokens"), (["--state-cache", "other"], "state_cache"),
        (["--layers", "0-1"], "layers"), (["--largest"], "largest"), (["--rounds", "1000"], "context"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_in_one_line(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", SMALL, "--device", "cpu", "--activation", "float32", *arguments]) == 1
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1
