"""Opening a checkpoint: names, forms of experts, heads, shards; whatever does not fit is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.paths import require_model
from tests.weights.small_models import BF16, NEMOTRON, QWEN, QWEN_MOE, Tensors, random_tensors, write
from trtllm_replayssm.errors import CheckpointError, ContractError
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import DenseMatrix

MTP = {**NEMOTRON, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
CONFIGS = {"nemotron": NEMOTRON, "nemotron-mtp": MTP, "qwen": QWEN, "qwen-moe": QWEN_MOE}


def all_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Every parameter as float32, stacks of experts as [E, N, K]."""
    values: dict[str, Any] = {}
    for name in checkpoint.names():
        role = checkpoint.spec(name).role.value
        if role == "experts":
            stack = checkpoint.experts(name)
            values[name] = np.stack([stack.matrix(e).dequantize() for e in range(len(stack))])
        else:
            values[name] = (
                checkpoint.vector(name) if role in ("vector", "conv") else checkpoint.matrix(name).dequantize()
            )
        assert values[name].shape == checkpoint.spec(name).shape
    return values


def check_values(checkpoint: Checkpoint, tensors: Tensors) -> None:
    """Every parameter has the values of `tensors` (canonical names, experts one by one)."""
    for name, got in all_values(checkpoint).items():
        if checkpoint.spec(name).role.value == "experts":
            block, projection = name.rsplit(".", 1)
            expected = np.stack([tensors[f"{block}.{e}.{projection}.weight"] for e in range(len(got))])
        else:
            expected = tensors[name]
        np.testing.assert_array_equal(got, expected.astype(np.float32))


def pack_experts(tensors: Tensors, *, fuse: bool) -> Tensors:
    """Stack experts to packed tensors, gate and up in one (gate rows first) when `fuse`."""
    singles = [name for name in tensors if ".experts." in name]
    packed = {name: array for name, array in tensors.items() if name not in singles}
    stacks: dict[str, list[Any]] = {}
    for name in sorted(singles, key=lambda n: int(n.split(".experts.")[1].split(".")[0])):
        block, rest = name.split(".experts.")
        stacks.setdefault(f"{block}.experts.{rest.split('.')[1]}", []).append(tensors[name])
    for name, parts in stacks.items():
        packed[name] = np.stack(parts)
    for name in [n for n in packed if n.endswith(".experts.gate_proj") and fuse]:
        up = packed.pop(name.replace("gate_proj", "up_proj"))
        packed[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([packed.pop(name), up], axis=1)
    return packed


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    out = {}
    for name, array in tensors.items():
        for old, new in pairs:
            name = new + name[len(old) :] if name.startswith(old) else name
        out[name] = array
    return out


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_has_the_values_of_the_file(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors(CONFIGS[kind])
    with Checkpoint.open(write(tmp_path, CONFIGS[kind], tensors)) as checkpoint:
        check_values(checkpoint, tensors)
        assert checkpoint.unused() == [] and checkpoint.notes() == [] and checkpoint.directory == tmp_path


@pytest.mark.parametrize(
    ("config", "renames"),
    [
        (QWEN, [("model.", "model.language_model.")]),
        (NEMOTRON, [("backbone.", "model.")]),
        (NEMOTRON, [("backbone.", "model."), ("model.embeddings.", "model.embed_tokens.")]),
        (NEMOTRON, [("backbone.embeddings.", "backbone.embed_tokens.")]),
    ],
)
def test_prefixes_of_public_files_are_mapped(tmp_path: Path, config: dict[str, Any], renames: Any) -> None:
    tensors = random_tensors(config)
    with Checkpoint.open(write(tmp_path, config, renamed(tensors, *renames))) as checkpoint:
        check_values(checkpoint, tensors)


@pytest.mark.parametrize(("kind", "fuse"), [("qwen-moe", True), ("qwen-moe", False), ("nemotron-mtp", False)])
def test_packed_experts_are_read_one_by_one(tmp_path: Path, kind: str, fuse: bool) -> None:
    tensors = random_tensors(CONFIGS[kind])
    packed = pack_experts(tensors, fuse=fuse)
    assert any(".experts.gate_up_proj" in name for name in packed) is fuse
    with Checkpoint.open(write(tmp_path, CONFIGS[kind], packed)) as checkpoint:
        check_values(checkpoint, tensors)
        name = next(n for n in checkpoint.names() if n.endswith("experts.up_proj"))
        matrix = checkpoint.experts(name).matrix(1)
        assert isinstance(matrix, DenseMatrix) and not matrix.data.flags.owndata  # a view: nothing was copied


def test_values_stored_as_float32_are_kept(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN)
    for name in ("model.layers.0.linear_attn.A_log", "model.layers.0.linear_attn.norm.weight", "model.norm.weight"):
        tensors[name] = np.random.default_rng(1).standard_normal(tensors[name].shape).astype(np.float32)
    with Checkpoint.open(write(tmp_path, QWEN, tensors)) as checkpoint:
        check_values(checkpoint, tensors)


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN_MOE)
    write_shards(tmp_path, QWEN_MOE, tensors)
    with Checkpoint.open(tmp_path) as checkpoint:
        check_values(checkpoint, tensors)


def write_shards(directory: Path, config: dict[str, Any], tensors: Tensors) -> dict[str, str]:
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == part}, directory / part)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_a_wrong_index_is_named(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path, QWEN, random_tensors(QWEN))
    index = tmp_path / "model.safetensors.index.json"
    first, second = sorted(weight_map)[:2]
    for change, message in (
        ({**weight_map, "ghost": "part-0.safetensors"}, "ghost"),
        ({**weight_map, first: "part-9.safetensors"}, "part-9"),
        ({**weight_map, first: "../part-0.safetensors"}, "without a folder"),
        ({**weight_map, first: weight_map[second]}, first),
        ({n: f for n, f in weight_map.items() if n != first}, first),
        ([], "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": change}))
        with pytest.raises(CheckpointError, match=message):
            Checkpoint.open(tmp_path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="index"):
        Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="both"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_missing_tensor_is_named(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors(CONFIGS[kind])
    for name in tensors:
        rest = {n: a for n, a in tensors.items() if n != name}
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            Checkpoint.open(write(tmp_path, CONFIGS[kind], rest))


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_misshaped_or_mistyped_tensor_is_named(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors(CONFIGS[kind])
    for name, array in tensors.items():
        for bad in (array[..., :-1], array[None], array.astype(np.int32), array.astype(np.float64)):
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                Checkpoint.open(write(tmp_path, CONFIGS[kind], {**tensors, name: bad}))


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.linear_attn.in_proj_qkvz.weight", "model.layers.9.input_layernorm.weight", "lm_head.bias",
     "model.layers.0.mlp.up_proj.pre_quant_scale", "model.layers.0.mlp.up_proj.weight_scale"],
)  # fmt: skip
def test_an_extra_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = {**random_tensors(QWEN), name: np.ones(1, np.float32)}
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Checkpoint.open(write(tmp_path, QWEN, tensors))


def test_two_spellings_of_one_tensor_are_an_error(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN)
    tensors["model.language_model.norm.weight"] = tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        Checkpoint.open(write(tmp_path, QWEN, tensors))


def test_the_vision_tower_is_listed_as_unused(tmp_path: Path) -> None:
    extra = {"model.visual.blocks.0.attn.qkv.weight": np.zeros((2, 2), BF16)}
    with Checkpoint.open(write(tmp_path, QWEN, {**random_tensors(QWEN), **extra})) as checkpoint:
        assert checkpoint.unused() == list(extra)


@pytest.mark.parametrize("kind", ["nemotron-mtp", "qwen"])
def test_an_absent_mtp_head_is_noted_and_a_partial_one_is_an_error(tmp_path: Path, kind: str) -> None:
    tensors = random_tensors(CONFIGS[kind])
    main = {name: array for name, array in tensors.items() if not name.startswith("mtp.")}
    with Checkpoint.open(write(tmp_path, CONFIGS[kind], main)) as checkpoint:
        assert checkpoint.geometry.mtp_pattern == () and "multi-token" in checkpoint.notes()[0]
        assert not any(name.startswith("mtp.") for name in checkpoint.names())
        check_values(checkpoint, main)
    one = next(name for name in tensors if name.startswith("mtp."))
    with pytest.raises(CheckpointError, match=r"mtp\..*no such tensor"):
        Checkpoint.open(write(tmp_path, CONFIGS[kind], {**main, one: tensors[one]}))


def test_an_mtp_head_that_the_config_does_not_announce_is_listed(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN.items() if key != "mtp_num_hidden_layers"}
    with Checkpoint.open(write(tmp_path, config, random_tensors(QWEN))) as checkpoint:
        assert checkpoint.geometry.mtp_pattern == () and "announce" in checkpoint.notes()[0]
        assert "mtp.fc.weight" in checkpoint.unused()


def test_tied_embeddings_need_no_head_and_accept_a_copy(tmp_path: Path) -> None:
    config = {**QWEN, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    assert "lm_head.weight" not in tensors
    with Checkpoint.open(write(tmp_path / "tied", config, tensors)) as checkpoint:
        check_values(checkpoint, tensors)
    table = tensors["model.embed_tokens.weight"]
    with Checkpoint.open(write(tmp_path / "copy", config, {**tensors, "lm_head.weight": table})) as checkpoint:
        assert checkpoint.unused() == ["lm_head.weight"] and checkpoint.geometry.tie_embeddings
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        Checkpoint.open(write(tmp_path / "other", config, {**tensors, "lm_head.weight": table + BF16(1)}))


def test_kv_scales_are_served_by_absolute_layer(tmp_path: Path) -> None:
    tensors = random_tensors(MTP)
    prefix = "backbone.layers.2.mixer."
    tensors[prefix + "k_proj.k_scale"] = np.asarray(0.5, np.float32)
    tensors[prefix + "v_proj.v_scale"] = np.asarray([2.0], np.float32)
    with Checkpoint.open(write(tmp_path, MTP, tensors)) as checkpoint:
        assert checkpoint.kv_scales(4) == (1.0, 1.0)  # none stored
    tensors["mtp.layers.0.mixer.k_proj.k_scale"] = np.asarray(3.0, np.float32)
    tensors["mtp.layers.0.mixer.v_proj.v_scale"] = np.asarray(4.0, np.float32)
    with Checkpoint.open(write(tmp_path, MTP, tensors)) as checkpoint:
        assert checkpoint.kv_scales(2) == (0.5, 2.0)
        assert checkpoint.geometry.kv_layers == (2, 4) and checkpoint.kv_scales(4) == (3.0, 4.0)
        assert len(checkpoint.unused()) == 4
        with pytest.raises(ContractError, match="layer"):
            checkpoint.kv_scales(0)
    del tensors[prefix + "v_proj.v_scale"]
    with pytest.raises(CheckpointError, match=r"v_proj\.v_scale"):
        Checkpoint.open(write(tmp_path, MTP, tensors))


def test_wrong_names_and_a_closed_checkpoint_are_contract_errors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, QWEN_MOE, random_tensors(QWEN_MOE)))
    for call, name in (
        (checkpoint.matrix, "model.norm.weight"),
        (checkpoint.vector, "model.embed_tokens.weight"),
        (checkpoint.experts, "model.layers.0.mlp.gate.weight"),
        (checkpoint.matrix, "model.layers.0.linear_attn.conv1d.weight"),
        (checkpoint.matrix, "nothing"),
        (checkpoint.spec, "nothing"),
    ):
        with pytest.raises(ContractError, match=name):
            call(name)
    assert checkpoint.vector("model.layers.0.linear_attn.conv1d.weight").ndim == 3
    table = checkpoint.matrix("model.embed_tokens.weight")
    checkpoint.close()
    assert np.isfinite(table.dequantize()).all()  # arrays outlive it
    with pytest.raises(ContractError, match="closed"):
        checkpoint.matrix("model.embed_tokens.weight")


def test_a_vector_with_nan_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN)
    tensors["model.norm.weight"][3] = np.nan
    with (
        Checkpoint.open(write(tmp_path, QWEN, tensors)) as checkpoint,
        pytest.raises(CheckpointError, match=r"model\.norm"),
    ):
        checkpoint.vector("model.norm.weight")


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["nemotron-tiny", "nemotron-moe-tiny", "qwen3_5-tiny", "qwen3_5-moe-tiny"])
def test_originals_open_without_a_note(name: str) -> None:
    with Checkpoint.open(require_model(name)) as checkpoint:
        assert checkpoint.notes() == [] and checkpoint.unused() == []
        assert all(np.isfinite(values).all() for values in all_values(checkpoint).values())


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "whole", QWEN, random_tensors(QWEN))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    content = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"/model\.safetensors"):
        Checkpoint.open(tmp_path / "cut")


def test_what_is_no_checkpoint_is_told_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, found in (("none", "no such directory"), ("empty", "one without config.json"), ("file", "a file")):
        with pytest.raises(CheckpointError, match=rf"{name}: expected a directory with config.json .*, got {found}\. "):
            Checkpoint.open(tmp_path / name)
