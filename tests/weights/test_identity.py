"""What tells two checkpoints of one geometry apart, and what does not: copies, other files for the same tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.weights.small_models import BF16, NEMOTRON, Tensors, random_tensors, write
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.identity import PIECE, checkpoint_identity


def identity(directory: Path) -> str:
    with Checkpoint.open(directory) as checkpoint:
        return checkpoint_identity(checkpoint)


def test_copies_and_other_files_of_the_same_tensors_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = random_tensors(NEMOTRON)
    first = identity(write(tmp_path / "first", NEMOTRON, tensors))
    assert first.startswith("sha256:") and len(first) == 7 + 64
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    for path in (tmp_path / "copy").iterdir():
        os.utime(path, (0, 0))
    (tmp_path / "copy" / "config.json").write_text(json.dumps(NEMOTRON, indent=4, sort_keys=True))
    assert identity(tmp_path / "copy") == first
    names, cut = sorted(tensors), tmp_path / "cut"
    write(cut, NEMOTRON, {})
    (cut / "model.safetensors").unlink()
    files = {"model-1-of-2.safetensors": names[1::2], "model-2-of-2.safetensors": names[::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, cut / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    assert identity(cut) == first


def nudge(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        values = tensors[name].astype(np.float32)
        tensors[name] = (values + np.float32(0.25)).astype(tensors[name].dtype)

    return change


CHANGES: dict[str, Callable[[Tensors], None]] = {
    "a vector": nudge("backbone.layers.0.mixer.A_log"),
    "a matrix": nudge("backbone.layers.1.mixer.up_proj.weight"),
    "the first expert": nudge("backbone.layers.3.mixer.experts.0.up_proj.weight"),
    "one that is not used": lambda tensors: tensors.update({"model.visual.weight": np.zeros(4, BF16)}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_weights_of_the_same_names_and_shapes_are_another_checkpoint(
    tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    tensors = random_tensors(NEMOTRON)
    first = identity(write(tmp_path / "first", NEMOTRON, tensors))
    change(tensors)
    assert identity(write(tmp_path / "other", NEMOTRON, tensors)) != first


def test_another_configuration_is_another_checkpoint(tmp_path: Path) -> None:
    tensors = random_tensors(NEMOTRON)
    other = {**NEMOTRON, "routed_scaling_factor": 2.75}
    assert identity(write(tmp_path / "a", NEMOTRON, tensors)) != identity(write(tmp_path / "b", other, tensors))


def test_of_a_large_tensor_the_middle_is_read_and_of_routed_experts_the_first(tmp_path: Path) -> None:
    """What keeps it cheap for a hundred gigabytes, and what it therefore cannot see."""
    config = {**NEMOTRON, "intermediate_size": 2 * PIECE // 32}
    tensors = random_tensors(config)
    first = identity(write(tmp_path / "first", config, tensors))
    large = tensors["backbone.layers.1.mixer.up_proj.weight"]
    assert large.nbytes > 2 * PIECE
    kept = large[0, 0]
    large[0, 0] = kept + BF16(1)
    nudge("backbone.layers.3.mixer.experts.1.up_proj.weight")(tensors)
    assert identity(write(tmp_path / "edges", config, tensors)) == first
    large[len(large) // 2, 0] += BF16(1)
    assert identity(write(tmp_path / "middle", config, tensors)) != first
