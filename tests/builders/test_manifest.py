"""The manifest of a bundle: strict in both directions, and every refusal names the first thing that differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtllm_replayssm.bindings import EngineStep, OpStep, Program, TensorSpec, View
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import EngineMismatchError
from trtllm_replayssm.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    BuildInfo,
    EngineMemory,
    Manifest,
    Profile,
    check_files,
    file_digest,
    first_difference,
    read_manifest,
    require_same,
    to_json,
    write_manifest,
)
from trtllm_replayssm.weights.presets import preset_geometry, preset_names

BUILD = BuildInfo(
    flavour="tensorrt_rtx", tensorrt_version="1.7.1", product_version="0.1.0", target="12.0", activation="bfloat16",
    weights="checkpoint", checkpoint="sha256:0", max_batch=8, max_seq_len=64, context_rows=1, context_tokens=32,
    tp_size=1, tp_rank=0, peak_rss_bytes=1, seconds=2.5,
)  # fmt: skip
PROGRAM = Program(
    name="main",
    tensors={"x": TensorSpec(name="x", dtype="bfloat16", dims=("B", "T", 4))},
    outputs={"logits": "x"},
    steps=(
        EngineStep(engine="segments/000.engine", inputs={"ids": "ids"}, outputs={"x": "x"}),
        OpStep(op="MoeExperts", layer=-1, inputs={"x": View(tensor="x", start=0, width=4)}, outputs={"out": "y"},
               weights={"up_proj": "a.experts.up_proj"}),
    ),
)  # fmt: skip


def manifest(preset: str = "qwen3.5-4b", files: dict[str, str] | None = None) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION, build=BUILD, geometry=preset_geometry(preset),
        replay=ReplayConfig(window=8, read=StateFormat.NVFP4),
        profiles={"context": Profile(rows=(1, 1, 1), tokens=(1, 16, 32), selected=(1, 1, 1), phase=2)},
        programs={"main": PROGRAM},
        memory={"segments/000.engine": EngineMemory(shared=(4096,), own=(0,))}, files=files or {},
    )  # fmt: skip


@pytest.mark.parametrize("preset", preset_names())
def test_what_is_written_is_read_back(preset: str, tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest(preset))
    assert read_manifest(tmp_path) == manifest(preset)


def edited(directory: Path, edit: Any) -> None:
    write_manifest(directory, manifest())
    value = json.loads((directory / MANIFEST).read_text())
    edit(value)
    (directory / MANIFEST).write_text(json.dumps(value))


EDITS = [
    ("format_version", lambda m: m.update(format_version=99)),
    ("format_version", lambda m: (m.update(format_version=1), m["build"].pop("checkpoint"))),
    ("manifest.surprise", lambda m: m.update(surprise=1)),
    ("manifest.profiles", lambda m: m.pop("profiles")),
    ("manifest.build.max_batch", lambda m: m["build"].update(max_batch="8")),
    ("manifest.build.max_batch", lambda m: m["build"].update(max_batch=True)),
    ("manifest.geometry.layers[3]", lambda m: m["geometry"]["layers"].__setitem__(3, "convolution")),
    ("manifest.replay.window", lambda m: m["replay"].pop("window")),
    ("manifest.programs.main.steps[1]", lambda m: m["programs"]["main"]["steps"][1].pop("weights")),
    ("manifest.profiles.context.rows", lambda m: m["profiles"]["context"].update(rows=[1, 2])),
    ("manifest.build.activation", lambda m: m["build"].update(activation="bfloat61")),
    ("manifest.memory.segments/000.engine.own", lambda m: m["memory"]["segments/000.engine"].update(own=[0, 0])),
    ("manifest.memory.segments/000.engine.shared", lambda m: m["memory"]["segments/000.engine"].update(shared=[1, 2])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit"), EDITS, ids=[f"{i}-{name}" for i, (name, _) in enumerate(EDITS)])
def test_a_changed_manifest_is_refused_by_name(name: str, edit: Any, tmp_path: Path) -> None:
    edited(tmp_path, edit)
    with pytest.raises(EngineMismatchError) as caught:
        read_manifest(tmp_path)
    assert caught.value.argument == name


def test_a_setting_that_could_not_have_been_built_is_refused(tmp_path: Path) -> None:
    """Validation of the settings themselves runs on what is read."""
    edited(tmp_path, lambda m: m["replay"].update(window=1000))
    with pytest.raises(ValueError, match="window"):
        read_manifest(tmp_path)


def test_altered_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    names = ["segments/000.engine", "weights.bin"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    built = manifest(files={name: file_digest(tmp_path / name) for name in names})
    write_manifest(tmp_path, built)
    check_files(tmp_path, built)
    (tmp_path / "foreign").write_bytes(b"")
    with pytest.raises(EngineMismatchError, match="foreign"):
        check_files(tmp_path, built)
    (tmp_path / "foreign").unlink()
    (tmp_path / names[1]).write_bytes(b"weights.bix")
    with pytest.raises(EngineMismatchError, match=r"weights\.bin: expected SHA-256"):
        check_files(tmp_path, built)
    (tmp_path / names[0]).unlink()
    with pytest.raises(EngineMismatchError, match=r"segments/000\.engine: expected a file of the bundle"):
        check_files(tmp_path, built)


def test_the_first_difference_of_two_values_is_named() -> None:
    one, other = manifest(), manifest()
    assert first_difference(to_json(one), to_json(other), "") is None
    other = replace(other, build=replace(BUILD, max_batch=9, target="8.9"))
    assert first_difference(to_json(one), to_json(other), "") == ("build.target", "12.0", "8.9")
    with pytest.raises(EngineMismatchError, match=r"build\.target: expected 8\.9, got 12\.0"):
        require_same("load", one, other)
