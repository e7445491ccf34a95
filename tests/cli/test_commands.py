"""The command line end to end, in this process: output, JSON, exit codes, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import EXAMPLES, ROOT
from trtllm_replayssm.cli import main

QWEN = str(EXAMPLES / "qwen3_5-tiny-nvfp4")
SMALL = str(ROOT / "tests" / "checkpoints" / "qwen-moe")
PRESET = "nemotron-3-nano-4b"
TEXT = str(ROOT / "LICENSE")
WINDOWS = str(ROOT / "benchmarks" / "results" / "eval_windows.json")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_generate_prints_prompt_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", QWEN, "--prompt", "The history of the", "--max-tokens", "8", "--stats")
    assert code == 0
    assert out.startswith("The history of the\n")
    assert "tokens_per_second" in err


def test_generate_json_is_the_same_drafted_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("generate", QWEN, "--prompt", "And the LORD", "--max-tokens", "16", "--json")
    code, out, _ = run(capsys, *common)
    assert code == 0
    plain = json.loads(out)
    drafted = json.loads(run(capsys, *common, "--drafter", "mtp", "--draft-len", "3")[1])
    assert drafted["requests"][0]["choices"][0]["token_ids"] == plain["requests"][0]["choices"][0]["token_ids"]
    assert plain["stats"]["mean_acceptance_length"] == 1.0
    assert drafted["stats"]["mean_acceptance_length"] > 1.0


def test_generate_takes_every_activation_type(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", QWEN, "--prompt", "The history of the", "--max-tokens", "6", "--device", "cpu", "--dtype")
    texts = {dtype: run(capsys, *command, dtype)[1] for dtype in ("auto", "float32", "bfloat16", "float16")}
    assert len(set(texts.values())) == 1 and "Russian" in texts["auto"]


def test_generate_with_a_seed_is_reproducible_and_choices_differ(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", QWEN, "--prompt", "A", "--max-tokens", "12", "--temperature", "1", "--seed", "3", "--n", "2")
    first, second = (json.loads(run(capsys, *command, "--json")[1])["requests"][0]["choices"] for _ in range(2))
    assert first == second
    assert first[0]["token_ids"] != first[1]["token_ids"]


def test_inspect_preset_reports_memory_traffic_and_window(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", "nemotron-3-super-120b-a12b-nvfp4", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["slot_bytes"]["replay"]["checkpoint"] == 40 * 128 * 64 * 128 * 4
    assert report["traffic"]["conventional_bytes_per_token"] == 2 * 40 * 128 * 64 * 128 * 4
    assert 1.7 < report["traffic"]["conventional_over_replay"] < 2.0
    code, out, _ = run(capsys, "inspect", "nemotron-3-super-120b-a12b-nvfp4")
    assert code == 0
    assert "best window by the traffic model" in out and "  kv (8192 positions) " in out
    assert "  kv (100 positions) " in run(capsys, "inspect", QWEN, "--max-seq-len", "100")[1]


def test_inspect_checkpoint_lists_bytes_by_format(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "inspect", QWEN, "--json")[1])
    assert report["bytes"]["nvfp4"] > 0
    assert report["mtp_pattern"] == "*"


def test_quantize_writes_a_checkpoint_that_generates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "quantised"
    code, out, _ = run(capsys, "quantize", SMALL, str(target), "--recipe", "experts", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["quantised"]["nvfp4"] > 0
    assert report["written_bytes"] < report["source_bytes"]
    assert json.loads(run(capsys, "inspect", str(target), "--json")[1])["bytes"]["nvfp4"] > 0


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("generate", "nowhere", "--prompt", "x"), "nowhere"),
        (("generate", QWEN, "--prompt", ""), "prompt"),
        (("generate", QWEN, "--prompt", "x", "--window", "2", "--drafter", "mtp"), "T_max <= L"),
        (("generate", QWEN, "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("inspect", "no-such-preset"), "no-such-preset"),
        (("inspect", QWEN, "--window", "0"), "window"),
        (("quantize", QWEN, str(ROOT)), str(ROOT)),
        (("generate", QWEN, "--prompt-file", "/bin/sh"), "UTF-8"),
        (("generate", QWEN, "--prompt", "x", "--device", "tpu"), "device"),
        (("inspect", PRESET, "--accepted", "0"), "mean_accepted"),
        (("plan", PRESET, "--gpu-memory", "nan"), "--gpu-memory"),
        (("plan", PRESET, "--gpu-memory", "inf"), "--gpu-memory"),
        (("plan", PRESET, "--gpu-memory", "-1"), "--gpu-memory"),
        (("plan", PRESET, "--gpu-memory", "80", "--max-num-tokens", "-5"), "--max-num-tokens"),
        (("plan", PRESET, "--gpu-memory", "80", "--max-batch-size", "0"), "--max-batch-size"),
        (("bench", "kernel", "--list", "--rounds", "0"), "--rounds"),
        (("bench", "step", SMALL, "--device", "cpu", "--rounds", "0"), "rounds"),
        (("bench", "throughput", QWEN, "--dataset", "x", "--num-requests", "-1"), "--num-requests"),
        (("bench", "throughput", QWEN, "--dataset", "x", "--warmup", "-1"), "--warmup"),
        (("bench", "throughput", QWEN, "--dataset", "x", "--noise", "nan"), "--noise"),
        (("eval", "decays", QWEN, "--text", TEXT, "--json", "x", "--tokens", "0"), "--tokens"),
        (("eval", "decays", QWEN, "--text", TEXT, "--json", "x", "--prompt", "0"), "--prompt"),
        (("eval", "decays", QWEN, "--text", "/bin/sh", "--json", "x"), "UTF-8"),
        (("eval", "tasks", QWEN, "--text", TEXT, "--json", "x", "--examples", "0"), "--examples"),
        (("eval", "skip", QWEN, "--text", TEXT, "--json", "x", "--records", "x"), "--records"),
        (("eval", "drift", WINDOWS, WINDOWS, "--json", "x"), "kind kl"),
        (("chat", "http://127.0.0.1:99999"), "65535"),
        (("chat", "http://[::1"), "url"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], part: str
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 1
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("trtllm-replayssm: ")
    assert part in err


def test_output_that_nobody_reads_ends_without_a_word() -> None:
    command = [sys.executable, "-m", "trtllm_replayssm", "inspect", PRESET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_tune_says_what_it_can_do_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = run(capsys, "tune", PRESET, "--batch", "8", "--measure", "--file", str(tmp_path / "tune.json"))
    assert code == 1 and "tune without --measure" in err


def test_wrong_usage_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate"])
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "quantize", "inspect"])
def test_help_describes_the_command(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "--json" in capsys.readouterr().out
