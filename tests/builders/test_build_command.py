"""`trtllm-replayssm build`, and `inspect` of a bundle: clear refusals, nothing half written or imported too early."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.builders.build import build
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.sources import checkpoint_source
from trtllm_replayssm.cli import main

SMALL = str(CHECKPOINTS / "nemotron-dense")
LIMITS = ["--target", "12.0", "--max-seq-len", "64", "--context-tokens", "16", "--max-batch-size", "2"]

REFUSALS = {
    "neither source": ([], "a directory or --preset"),
    "both sources": ([SMALL, "--preset", "qwen3.5-4b"], "a directory or --preset"),
    "preset without weights": (["--preset", "qwen3.5-4b"], "--random-weights"),
    "random checkpoint": ([SMALL, "--random-weights"], "--preset beside it"),
    "layers of nothing": (["--preset", "qwen3.5-4b", "--random-weights", "--layers", "3"], 'such as "0-3"'),
    "layers beyond the end": (["--preset", "qwen3.5-4b", "--random-weights", "--layers", "30-32"], "within 0-31"),
    "no capability": ([SMALL, "--target", "big"], 'such as "12.0"'),
    "a data-centre GPU": ([SMALL, "--target", "9.0"], "--flavour tensorrt"),
    "three GPUs": ([SMALL, "--target", "12.0", "--tp-size", "3"], "a divisor of the"),
    "a third of two GPUs": ([SMALL, "--tp-size", "2", "--tp-rank", "2"], "tp_rank: expected 0..1"),
    "a rank of one GPU": ([SMALL, "--tp-rank", "1"], "tp_rank: expected 0..0"),
    "a rank without end": ([SMALL, "--tp-size", "2", "--tp-rank", "9" * 5000], 'a number, or "all"'),
    "layers without end": (
        ["--preset", "qwen3.5-4b", "--random-weights", "--layers", "0-" + "9" * 5000], 'such as "0-3"',
    ),
    "no rank": ([SMALL, "--tp-size", "2", "--tp-rank", "first"], 'a number, or "all"'),
    "a chunk beyond the positions": ([SMALL, "--max-seq-len", "0"], "max_seq_len"),
    "drafts beyond the window": ([SMALL, "--window", "2", "--max-draft-len", "4"], "T_max"),
    "plugins on RTX": ([SMALL, "--target", "12.0", "--plugin-library", "x.so"], "takes no plugins"),
    "two quantisations": ([SMALL, "--quantize", "dense-nvfp4", "--weights", "bf16"], "--weights checkpoint"),
    "no tensorrt here": ([SMALL, "--flavour", "tensorrt"], "pip install"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU to build for is here")
def test_without_a_gpu_the_target_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", SMALL, *LIMITS[2:], "--output", str(tmp_path / "bundle")]) == 1
    error = capsys.readouterr().err
    assert "--target 12.0" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_built_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # also where it is installed
    arguments, said = REFUSALS[case]
    assert main(["build", *arguments, "--output", str(tmp_path / "bundle")]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_taken_destination_is_refused_before_any_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("keep")
    assert main(["build", SMALL, "-o", str(tmp_path), *LIMITS]) == 1
    assert "a new or an empty directory" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "keep"


def test_a_built_bundle_is_inspected_and_an_altered_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    assert main(["build", SMALL, "--output", str(bundle), *LIMITS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["peak_rss_bytes"] > report["largest_engine_bytes"] > 0 and report["seconds"] > 0
    config = json.loads((bundle / "config.json").read_text())
    assert config["pretrained_config"] == json.loads((Path(SMALL) / "config.json").read_text())
    assert config["build_config"]["max_seq_len"] == 64
    assert main(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "tensorrt_rtx" in shown and "profile     generation: rows 1..2" in shown
    assert "layers      2 ssm, 2 mlp, 1 attention" in shown and "logits float32 ['B', 'K', 256]" in shown
    assert main(["inspect", str(bundle), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["programs"]["main"]["engines"] == report["engines"]
    assert summary["memory"]["engine_bytes"] == report["engine_bytes"]
    assert summary["bindings"]["main"]["ids"] == "int32 ['B', 'T']"
    assert summary["outputs"]["main"]["logits"].startswith("float32 [")
    with (bundle / "segments" / "001.engine").open("ab") as stream:
        stream.write(b"!")
    assert main(["inspect", str(bundle)]) == 1
    assert "segments/001.engine: expected SHA-256" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("engines", [0, 2])
def test_a_build_that_is_stopped_leaves_nothing(error: type[BaseException], engines: int, tmp_path: Path) -> None:
    """The progress function raises while the library compiles, which must not end the process."""
    options = BuildOptions(target="12.0", max_seq_len=64, context_tokens=16, max_batch=2)
    calls = 0

    def stop(what: str, done: int) -> None:
        nonlocal calls
        calls += 1
        if done >= engines and calls > 3:
            raise error("stop")

    with checkpoint_source(SMALL, options) as source, pytest.raises(error):
        build(source.parameters, source.config, tmp_path / "bundle", options, progress=stop)
    assert not list(tmp_path.iterdir())


def test_a_terminated_command_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trtllm_replayssm", "build", SMALL, "-o", str(tmp_path / "bundle"), *LIMITS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not [*tmp_path.glob(".bundle-*/segments/001.engine")]:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143 and "stopped by SIGTERM" in error
    assert not list(tmp_path.iterdir())


def test_nothing_of_tensorrt_is_imported_before_a_build() -> None:
    code = (
        "import sys; import trtllm_replayssm.builders.build, trtllm_replayssm.builders.sources, "
        "trtllm_replayssm.builders.inspect_bundle, trtllm_replayssm.cli; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('tensorrt', 'tensorrt_rtx', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
