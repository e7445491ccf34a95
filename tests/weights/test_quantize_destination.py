"""Where a quantised checkpoint may be written, and that a command that is told to stop leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.weights.small_models import NEMOTRON, random_tensors, write
from trtllm_replayssm.builders.quantize import quantize
from trtllm_replayssm.errors import ConfigError

# Runs the command line; sends itself the signals named last while the third tensor is written.
COMMAND = """
import os, signal, sys
from trtllm_replayssm.builders.quantize_writer import SafetensorsWriter
from trtllm_replayssm.cli import main

source, destination, *names = sys.argv[1:]
write, calls = SafetensorsWriter.write, []
# not as inherited: under nohup it is ignored
signal.signal(signal.SIGHUP, signal.SIG_IGN if "ignored" in names else signal.SIG_DFL)

def write_and_signal(*arguments):
    calls.append(arguments)
    if len(calls) == 3:
        for name in names:
            if name != "ignored":
                os.kill(os.getpid(), getattr(signal, name))
    return write(*arguments)

SafetensorsWriter.write = write_and_signal
sys.exit(main(["quantize", source, destination]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", NEMOTRON, random_tensors(NEMOTRON))


@pytest.mark.parametrize(
    ("signals", "codes"),
    [
        (["SIGTERM"], {143}),
        (["SIGHUP"], {129}),
        (["SIGHUP", "SIGTERM", "SIGHUP"], {129, 143}),
        (["ignored", "SIGHUP"], {0}),
    ],
)
def test_a_command_told_to_stop_removes_its_work(
    source: Path, tmp_path: Path, signals: list[str], codes: set[int]
) -> None:
    target = tmp_path / "out" / "dst"
    target.parent.mkdir()
    command = [sys.executable, "-c", COMMAND, str(source), str(target), *signals]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode in codes, result
    assert (result.stderr == "") if codes == {0} else ("stopped by SIG" in result.stderr), result
    left = [path.name for path in target.parent.iterdir()]
    assert left == (["dst"] if codes == {0} else [])


def refused(source: Path, target: Path | str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"destination.*{reason}"):
        quantize(source, target, progress=lambda done, total, name: pytest.fail("work had begun"))


def test_a_symbolic_link_is_refused_before_the_work(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        (tmp_path / "link").symlink_to(tmp_path / name)
        refused(source, tmp_path / "link", "symbolic link")
        (tmp_path / "link").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "source"]


def test_the_current_directory_is_refused_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused(source, ".", "no name of its own")
    refused(source, "../here/sub/..", "no name of its own")
    refused(source, "../here", "the current directory")
    refused(source, tmp_path / "here", "the current directory")
    assert list((tmp_path / "here").iterdir()) == []


def test_a_mount_point_is_refused_before_the_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "volume")
    refused(source, tmp_path / "volume", "a mount point")


def test_a_link_above_the_destination_is_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    quantize(source, tmp_path / "link" / "dst")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["dst"]
    assert (tmp_path / "disk" / "dst").stat().st_mode & 0o777 == 0o755
