"""Result files and figures: every committed result is drawn again, from its JSON alone, as docs/results.md shows it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from trtllm_replayssm.cli import main
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.evaluation.results import read_results, write_results
from trtllm_replayssm.runtime.evaluation.tables import table
from trtllm_replayssm.runtime.evaluation.windows import SCENARIOS, accepted_tokens

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("eval_*.json"))
PLOTS = ROOT / "benchmarks" / "plots"
PAGE = ROOT / "docs" / "results.md"
PNG = b"\x89PNG\r\n\x1a\n"


def test_a_result_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    write_results(path, "kl", {"a": 1}, [{"kl": None}, {"kl": 0.5}])
    assert read_results(path) == {"what": "kl", "meta": {"a": 1}, "rows": [{"kl": None}, {"kl": 0.5}]}
    write_results(path, "kl", {"a": 1}, [])
    assert read_results(path)["rows"] == []
    for text in ("{", "[]", '{"what": "other"}', "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_results(path)


def test_every_figure_is_drawn_from_committed_results_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert len(RESULTS) >= 3
    copies = [shutil.copy(path, tmp_path) for path in RESULTS]
    out = tmp_path / "figures"
    assert main(["eval", "plot", *copies, "--out", str(out)]) == 0
    drawn = {Path(line).name for line in capsys.readouterr().out.split()}
    assert drawn == {p.name for p in out.iterdir()}
    assert drawn == {p.name for p in PLOTS.glob("eval_*.png")}, "draw the figures again"
    for path in out.iterdir():
        assert path.read_bytes().startswith(PNG) and path.stat().st_size > 5000


def test_drawing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("a", "b"):
        assert main(["eval", "plot", str(RESULTS[0]), "--out", str(tmp_path / folder)]) == 0
    first, second = (sorted((tmp_path / f).iterdir()) for f in ("a", "b"))
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second] != []


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["eval", "plot", str(RESULTS[0]), "--out", str(tmp_path)]) == 1
    assert "pip install -e '.[eval]'" in capsys.readouterr().err


def test_the_page_shows_every_figure_and_only_files_that_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = set(re.findall(r"\.\./benchmarks/plots/(eval_[\w.-]+\.png)", text))
    assert shown == {p.name for p in PLOTS.glob("eval_*.png")}
    for name in re.findall(r"benchmarks/results/[\w.-]+\.jsonl?\b", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_the_page_has_the_table_of_every_result(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "table", str(path)]) == 0
    assert capsys.readouterr().out.strip() in PAGE.read_text(encoding="utf-8"), "print the table again"


def test_tables_compare_what_was_measured_and_nothing_else() -> None:
    def row(formats: str, window: int, length: int, kl: float | None) -> dict[str, Any]:
        name = f"{formats}-L{window}"
        return {"configuration": name, "formats": formats, "window": window, "length": length, "kl": kl}

    meta, one = {"checkpoint": "c"}, [row("shared-nvfp4-sr", 16, 256, 2e-3)]
    assert table({"what": "kl", "meta": meta, "rows": one})[2:] == ["| shared-nvfp4-sr-L16 | 2.0e-03 |"]
    rows = [*one, row("shared-nvfp4-rtn", 16, 256, 1e-3), row("shared-nvfp4-sr", 4, 256, 8e-3)]
    rows += [row("shared-nvfp4-sr", 16, 512, 6e-3), row("shared-nvfp4-rtn", 16, 512, None)]
    text = "\n".join(table({"what": "kl", "meta": meta, "rows": rows}))
    assert "| shared-nvfp4-rtn-L16 | 1.0e-03 | diverged |" in text
    assert "| shared NVFP4: RTN / SR | 0.50 |  |" in text
    assert "| shared-nvfp4-sr: growth since N = 256 | 1.00 | 3.00 |" in text and "FP8" not in text
    assert "| KL at N = 256, by L | 4 | 16 |" in text and text.endswith("| shared-nvfp4-sr | 8.0e-03 | 2.0e-03 |")


def test_simulated_acceptance_has_the_stated_chances() -> None:
    always, never = accepted_tokens([1.0], 4, 0), accepted_tokens([0.0], 4, 0)
    assert set(always) == {4} and set(never) == {1}
    half = accepted_tokens([0.5], 2, 0)
    # standard error of the mean of 600 draws: 0.02; four of them
    assert sum(half) / len(half) == pytest.approx(1.5, abs=0.08)
    changing = accepted_tokens([1.0, 0.0, 1.0], 4, 0)
    assert (set(changing[:200]), set(changing[200:400]), set(changing[400:])) == ({4}, {1}, {4})
    assert all(len(lives) >= 1 for lives in SCENARIOS.values())


def test_eval_windows_and_drift_write_what_they_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.json"
    assert main(["eval", "windows", "--shapes", "qwen4b", "--tokens", "4", "--json", str(path)]) == 0
    rows = read_results(path)["rows"]
    assert len([r for r in rows if "scenario" in r]) == len(SCENARIOS) == len(capsys.readouterr().out.splitlines())
    for row in rows:
        if "alpha" in row:
            assert row["saved"] == sorted(row["saved"], reverse=True), "slower heads skip less"
    assert main(["eval", "windows", "--shapes", "qwen5b", "--json", str(path)]) == 1
