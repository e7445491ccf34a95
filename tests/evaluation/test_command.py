"""`trtllm-replayssm eval` on a bundled checkpoint: the files it writes, and what it does with those that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.bundled import NEMOTRON
from trtllm_replayssm.cli import main
from trtllm_replayssm.runtime.evaluation.results import read_results

TEXT = "The handler sends the log records to the appropriate destination, as the configuration says. " * 4


def text_file(folder: Path) -> str:
    path = folder / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_kl_measures_and_drift_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, kl, decays = text_file(tmp_path), tmp_path / "kl.json", tmp_path / "decays.json"
    options = [str(NEMOTRON), "--text", text, "--prompt", "8"]
    named = "shared-fp32-L16,shared-nvfp4-sr-L16"
    command = ["eval", "kl", *options, "--up-to", "256", "--configurations", named, "--json", str(kl)]
    assert main(command) == 0
    assert main(["eval", "decays", *options, "--tokens", "64", "--json", str(decays)]) == 0
    rows = {r["configuration"]: r for r in read_results(kl)["rows"]}
    assert list(rows) == named.split(",")
    assert abs(rows["shared-fp32-L16"]["kl"]) < 1e-6 < 1e-5 < rows["shared-nvfp4-sr-L16"]["kl"]
    assert (tmp_path / "kl.work" / "journal.jsonl").exists()
    meta = read_results(kl)["meta"]
    assert meta["command"] == " ".join(["trtllm-replayssm", *command]) and meta["commit"] and meta["driver"] == "none"
    drift = tmp_path / "drift.json"
    assert main(["eval", "drift", str(kl), str(decays), "--json", str(drift)]) == 0
    (row,) = read_results(drift)["rows"]
    # slow heads keep more error than fast ones: an order by chance would be near zero
    assert row["rank_correlation_all"] > 0.3
    capsys.readouterr()
    assert main([*command[:-1], str(tmp_path / "other.json"), "--work", str(tmp_path / "kl.work")]) == 0
    assert read_results(tmp_path / "other.json")["rows"] == read_results(kl)["rows"]


@pytest.mark.parametrize(
    "options,message",
    [
        (["kl", "--up-to", "300"], "256 times a power of two"),
        (["kl", "--seeds", "1,x"], "integers of at least 0, comma separated"),
        (["kl", "--configurations", "shared-fp8"], "FORMATS-LWINDOW"),
        (["kl", "--step-tokens", "0"], "--step-tokens: expected 1..16, got 0"),
        (["kl", "--step-tokens", "-3"], "--step-tokens: expected 1..16, got -3"),
        (["kl", "--device", "cuda:99"], "device"),
        (["skip", "--batch", "0"], "--batch: expected 1..2147483647, got 0"),
        (["skip", "--window", "65"], "--window: expected 1..64, got 65"),
        (["skip", "--records", "0,17"], "--records: expected at most --window 16, got 17"),
        (["skip", "--repeats", "-1"], "--repeats: expected at least 0, got -1"),
        (["tasks", "--lengths", ""], "integers of at least 0, comma separated"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, *rest = options
    command = ["eval", kind, str(NEMOTRON), "--text", text_file(tmp_path), "--json", str(tmp_path / "r.json")]
    assert main([*command, *rest]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_skip_asks_for_a_gpu_before_it_reads_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    command = ["eval", "skip", str(tmp_path / "none"), "--text", "none.txt", "--json", str(tmp_path / "r.json")]
    assert main(command) == 1
    assert capsys.readouterr().err.startswith("trtllm-replayssm: measure: device: expected a CUDA device, got none")
