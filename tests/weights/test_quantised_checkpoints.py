"""Quantised checkpoints: formats by the tensors present, scales checked, nothing read as something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paths import require_model
from tests.weights.small_models import (
    BF16,
    E4M3,
    NEMOTRON,
    QWEN,
    QWEN_MOE,
    Tensors,
    decode_by_hand,
    random_tensors,
    to_fp8,
    to_nvfp4,
    write,
)
from trtllm_replayssm.builders.quantize import quantize
from trtllm_replayssm.errors import CheckpointError, ConfigError
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import Fp8Matrix, MatrixFormat, Nvfp4Matrix
from trtllm_replayssm.weights.quant_config import parse_quant_config

EXPERT = "model.layers.0.mlp.experts.2.up_proj"
NVFP4 = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "mtp*"]}}


def nvfp4_experts(*, input_scale: float | None = 0.5) -> Tensors:
    """Qwen MoE whose main experts are NVFP4; everything else BF16, the MTP head too."""
    tensors = random_tensors(QWEN_MOE)
    for name in [n for n in tensors if ".experts." in n and not n.startswith("mtp.")]:
        to_nvfp4(tensors, name, input_scale=input_scale)
    return tensors


def read_everything(directory: Path) -> None:
    with Checkpoint.open(directory) as checkpoint:
        for name in checkpoint.matrix_names():
            for storage in checkpoint.storage(name):
                storage.read()


def test_nvfp4_experts_are_decoded_as_by_hand(tmp_path: Path) -> None:
    tensors = nvfp4_experts()
    with Checkpoint.open(write(tmp_path, QWEN_MOE, tensors, quant=NVFP4)) as checkpoint:
        matrix = checkpoint.experts("model.layers.0.mlp.experts.up_proj").matrix(2)
        assert isinstance(matrix, Nvfp4Matrix) and matrix.input_scale == 0.5
        by_hand = decode_by_hand(*(tensors[EXPERT + s] for s in (".weight", ".weight_scale")),
                                 float(tensors[EXPERT + ".weight_scale_2"]))  # fmt: skip
        np.testing.assert_array_equal(matrix.dequantize(np.float64), by_hand)
        assert checkpoint.notes() == []
        assert checkpoint.unused() == sorted(n for n in tensors if n.endswith(".input_scale"))


@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_scale_2", "input_scale"])
def test_f03_missing_expert_scale_is_named(tmp_path: Path, part: str) -> None:
    tensors = nvfp4_experts()
    del tensors[f"{EXPERT}.{part}"]
    with pytest.raises(CheckpointError, match=rf"experts\.2\.up_proj\.{part}: "):
        Checkpoint.open(write(tmp_path, QWEN_MOE, tensors, quant=NVFP4))


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("part", ["weight_scale_2", "input_scale"])
def test_f03_impossible_scalar_scale_is_named(tmp_path: Path, part: str, value: float) -> None:
    tensors = nvfp4_experts()
    tensors[f"{EXPERT}.{part}"] = np.asarray(value, np.float32)
    directory = write(tmp_path, QWEN_MOE, tensors, quant=NVFP4)
    with pytest.raises(CheckpointError, match=rf"experts\.2\.up_proj\.{part}: "):
        read_everything(directory)


def test_a_multiplier_that_leaves_float32_is_named(tmp_path: Path) -> None:
    tensors = nvfp4_experts()
    scales = tensors[f"{EXPERT}.weight_scale"]
    scales[:] = np.minimum(scales.astype(np.float32), 256).astype(E4M3)
    scales[1, 1] = 256
    edge = np.float32(np.finfo(np.float32).max / (6 * 256))
    for value, fits in ((edge, True), (np.nextafter(edge, np.float32(np.inf)), False), (np.float32(3e38), False)):
        tensors[f"{EXPERT}.weight_scale_2"] = np.asarray(value)
        directory = write(tmp_path, QWEN_MOE, tensors, quant=NVFP4)
        if fits:
            with Checkpoint.open(directory) as checkpoint:
                values = checkpoint.experts("model.layers.0.mlp.experts.up_proj").matrix(2).dequantize()
            assert np.isfinite(values).all()
        else:
            with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight_scale_2: .*finite in float32"):
                read_everything(directory)


def test_an_fp8_scale_that_leaves_float32_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(NEMOTRON)
    name = "backbone.layers.0.mixer.in_proj.weight"
    to_fp8(tensors, name, per_row=True)
    tensors[f"{name}_scale"][3] = 1e36
    with pytest.raises(CheckpointError, match=r"in_proj\.weight_scale: .*finite in float32"):
        read_everything(write(tmp_path, NEMOTRON, tensors, quant={"quant_algo": "FP8"}))


@pytest.mark.parametrize("code", [0x00, 0x80, 0xB8, 0x7F, 0xFF])  # 0, -0, -1, NaN, -NaN
def test_d05_impossible_block_scale_is_named_with_its_place(tmp_path: Path, code: int) -> None:
    tensors = nvfp4_experts()
    tensors[f"{EXPERT}.weight_scale"].view(np.uint8)[3, 1] = code
    directory = write(tmp_path, QWEN_MOE, tensors, quant=NVFP4)
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight_scale\[3, 1\]: "):
        read_everything(directory)


def test_d05_a_zero_scale_of_a_zero_block_is_zero(tmp_path: Path) -> None:
    tensors = nvfp4_experts()
    tensors[f"{EXPERT}.weight_scale"].view(np.uint8)[3, 1] = 0
    tensors[f"{EXPERT}.weight"][3, 8:16] = 0x80  # zero and minus zero
    with Checkpoint.open(write(tmp_path, QWEN_MOE, tensors, quant=NVFP4)) as checkpoint:
        values = checkpoint.experts("model.layers.0.mlp.experts.up_proj").matrix(2).dequantize()
        assert not values[3, 16:32].any() and values[3, :16].any()


def test_scalar_scales_may_have_shape_one(tmp_path: Path) -> None:
    tensors = nvfp4_experts()
    to_fp8(tensors, "model.layers.0.linear_attn.out_proj.weight")
    for name in [n for n in tensors if n.endswith(("weight_scale_2", "input_scale", "out_proj.weight_scale"))]:
        tensors[name] = tensors[name].reshape(1)
    directory = write(tmp_path, QWEN_MOE, tensors)
    read_everything(directory)
    with Checkpoint.open(directory) as checkpoint:
        fp8 = checkpoint.matrix("model.layers.0.linear_attn.out_proj.weight")
        assert isinstance(fp8, Fp8Matrix) and fp8.scale.shape == ()


def test_absent_input_scales_are_fine(tmp_path: Path) -> None:
    read_everything(write(tmp_path, QWEN_MOE, nvfp4_experts(input_scale=None), quant=NVFP4))


def test_wrong_scale_shapes_and_types_are_named(tmp_path: Path) -> None:
    fp8 = "model.layers.0.linear_attn.out_proj.weight"
    base = nvfp4_experts()
    to_fp8(base, fp8)
    scale = base[f"{EXPERT}.weight_scale"]
    for name, bad in (
        (f"{EXPERT}.weight_scale", scale[:, :1]),
        (f"{EXPERT}.weight_scale", scale.T),
        (f"{EXPERT}.weight_scale", scale.astype(np.float32)),
        (f"{EXPERT}.weight_scale", scale.view(np.uint8)),
        (f"{EXPERT}.weight_scale_2", np.ones(2, np.float32)),
        (f"{EXPERT}.weight_scale_2", np.asarray(1, np.float16)),
        (f"{EXPERT}.input_scale", np.ones((1, 1), np.float32)),
        (fp8 + "_scale", np.ones(3, np.float32)),
        (fp8 + "_scale", np.ones((1, 32), np.float32)),
        (fp8 + "_scale", np.asarray(1, np.float64)),
    ):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            Checkpoint.open(write(tmp_path, QWEN_MOE, {**base, name: np.ascontiguousarray(bad)}))


def test_f04_nvfp4_base_with_a_bf16_head_is_decided_per_tensor(tmp_path: Path) -> None:
    config = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}}  # forgets mtp.fc
    tensors = nvfp4_experts()
    with Checkpoint.open(write(tmp_path, QWEN_MOE, tensors, quant=config)) as checkpoint:
        assert checkpoint.matrix("mtp.fc.weight").format is MatrixFormat.BF16
        np.testing.assert_array_equal(
            checkpoint.matrix("mtp.fc.weight").dequantize(), tensors["mtp.fc.weight"].astype(np.float32)
        )
        assert checkpoint.experts("mtp.layers.0.mlp.experts.up_proj").matrix(0).format is MatrixFormat.BF16
        assert checkpoint.experts("model.layers.0.mlp.experts.up_proj").matrix(0).format is MatrixFormat.NVFP4


def test_f06_mixed_precision_is_read_per_tensor(tmp_path: Path) -> None:
    tensors = random_tensors(NEMOTRON)
    mamba = "backbone.layers.0.mixer."
    layers: dict[str, Any] = {}
    for name in [n for n in tensors if ".experts." in n]:
        to_nvfp4(tensors, name)
        layers[name.removesuffix(".weight")] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    for name in ("in_proj", "out_proj"):
        to_fp8(tensors, f"{mamba}{name}.weight")
        layers[mamba + name] = {"quant_algo": "FP8"}
    quant = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    with Checkpoint.open(write(tmp_path, NEMOTRON, tensors, quant=quant)) as checkpoint:
        assert checkpoint.notes() == []
        formats = {n: {s.format.value for s in checkpoint.storage(n)} for n in checkpoint.matrix_names()}
        assert formats.pop("backbone.layers.3.mixer.experts.up_proj") == {"nvfp4"}
        assert formats.pop("backbone.layers.3.mixer.experts.down_proj") == {"nvfp4"}
        assert formats.pop(mamba + "in_proj.weight") == formats.pop(mamba + "out_proj.weight") == {"fp8"}
        assert set.union(*formats.values()) == {"bf16"}
        expected = tensors[mamba + "in_proj.weight"].astype(np.float64) * float(tensors[mamba + "in_proj.weight_scale"])
        np.testing.assert_array_equal(checkpoint.matrix(mamba + "in_proj.weight").dequantize(np.float64), expected)
    for algorithm in ("NVFP5", "MXFP8", None, 4):
        layers[mamba + "in_proj"] = {"quant_algo": algorithm}
        with pytest.raises(ConfigError, match=r"quantized_layers\[backbone\.layers\.0\.mixer\.in_proj\]"):
            Checkpoint.open(write(tmp_path, NEMOTRON, tensors, quant=quant))


def test_f06_unknown_algorithms_are_refused() -> None:
    for algorithm in ("INT4_AWQ", "NVFP4_AWQ", "W4A8_AWQ", "FP8_PB_WO", "nvfp4", "", 4, ["NVFP4"]):
        with pytest.raises(ConfigError, match="quant_algo"):
            parse_quant_config({"quantization": {"quant_algo": algorithm}}, "hf_quant_config.json")
    for content, key in (
        ({"quant_method": "awq", "quant_algo": "NVFP4"}, "quant_method"),
        ({"quant_method": "compressed-tensors"}, "quant_method"),
        ({"quant_method": "modelopt"}, "quant_algo"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size"),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "INT3"}, "kv_cache_quant_algo"),
        ({"quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4_AFFINE"}, "kv_cache_quant_algo"),
        ({"quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "kv_cache_quant_algo"),
        ({"quant_algo": "NVFP4", "ignore": "lm_head"}, "ignore"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
        ([], "object"),
        ({"quantization": 3}, "object"),
    ):
        with pytest.raises(ConfigError, match=key):
            parse_quant_config(content, "config.json quantization_config")
    for algorithm in ("NVFP4", "FP8", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        parsed = parse_quant_config({"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "ignore": ["a*"]}, "x")
        assert parsed is not None and (parsed.algorithm, parsed.kv_cache, parsed.excluded) == (
            algorithm,
            "FP8",
            ("a*",),
        )
    assert parse_quant_config({"quant_algo": None}, "x") is None


def test_f06_a_quantised_file_without_a_config_is_not_read_as_plain(tmp_path: Path) -> None:
    with Checkpoint.open(write(tmp_path, QWEN_MOE, nvfp4_experts())) as checkpoint:
        assert "24 matrices are quantised" in checkpoint.notes()[0]
        assert checkpoint.experts("model.layers.0.mlp.experts.up_proj").matrix(0).format is MatrixFormat.NVFP4


def test_f06_disagreements_are_noted_and_the_tensors_win(tmp_path: Path) -> None:
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "mtp.fc": {"quant_algo": "FP8"}}}  # fmt: skip
    config = {**QWEN_MOE, "quantization_config": mixed}
    with Checkpoint.open(write(tmp_path / "a", config, nvfp4_experts(), quant=NVFP4)) as checkpoint:
        assert checkpoint.quantization is not None and checkpoint.quantization.algorithm == "MIXED_PRECISION"
        assert "hf_quant_config.json says NVFP4" in checkpoint.notes()[0]
        assert "25 matrices are stored otherwise" in checkpoint.notes()[1]
    with Checkpoint.open(write(tmp_path / "b", QWEN_MOE, random_tensors(QWEN_MOE), quant=NVFP4)) as checkpoint:
        assert checkpoint.notes() == ["the configuration says NVFP4, but no matrix is quantised"]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("scale_type", [np.float32, BF16])
def test_f07_per_row_fp8_inside_nvfp4_loads(tmp_path: Path, flat: bool, scale_type: Any) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors = nvfp4_experts()
    to_fp8(tensors, name, per_row=True, flat=flat)
    tensors[name + "_scale"] = tensors[name + "_scale"].astype(scale_type)
    with Checkpoint.open(write(tmp_path, QWEN_MOE, tensors, quant=NVFP4)) as checkpoint:
        matrix = checkpoint.matrix(name)
        assert isinstance(matrix, Fp8Matrix) and matrix.scale.shape == (32, 1)
        expected = tensors[name].astype(np.float64) * tensors[name + "_scale"].astype(np.float64).reshape(-1, 1)
        np.testing.assert_array_equal(matrix.dequantize(np.float64), expected)
    tensors[name + "_scale"].reshape(-1)[7] = 0
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale: "):
        read_everything(write(tmp_path, QWEN_MOE, tensors, quant=NVFP4))


def test_f07_blockwise_fp8_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors = random_tensors(QWEN)
    to_fp8(tensors, name)
    tensors[name + "_scale_inv"] = tensors.pop(name + "_scale").reshape(1, 1)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale: "):
        Checkpoint.open(write(tmp_path, QWEN, tensors))


@pytest.mark.parametrize("tied", [False, True])
def test_f08_nvfp4_lm_head_applies_its_second_scale(tmp_path: Path, tied: bool) -> None:
    config = {**QWEN, "tie_word_embeddings": tied}
    tensors = random_tensors({**QWEN, "tie_word_embeddings": False})
    to_nvfp4(tensors, "lm_head.weight")
    tensors["lm_head.weight_scale_2"] = np.asarray(0.0123, np.float32)
    with Checkpoint.open(write(tmp_path, config, tensors)) as checkpoint:
        assert not checkpoint.geometry.tie_embeddings  # the head has values of its own
        assert any("tie" in note for note in checkpoint.notes()) is tied
        by_hand = decode_by_hand(tensors["lm_head.weight"], tensors["lm_head.weight_scale"], np.float32(0.0123))
        np.testing.assert_array_equal(checkpoint.matrix("lm_head.weight").dequantize(np.float64), by_hand)
        assert checkpoint.matrix("model.embed_tokens.weight").format is MatrixFormat.BF16


def test_f08_fp8_head_and_quantised_tied_table_load(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN)
    to_fp8(tensors, "lm_head.weight")
    with Checkpoint.open(write(tmp_path / "fp8", QWEN, tensors)) as checkpoint:
        assert checkpoint.matrix("lm_head.weight").format is MatrixFormat.FP8
    config = {**QWEN, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    to_nvfp4(tensors, "model.embed_tokens.weight")
    with Checkpoint.open(write(tmp_path / "tied", config, tensors)) as checkpoint:
        assert checkpoint.matrix("model.embed_tokens.weight").format is MatrixFormat.NVFP4
    tensors["lm_head.weight"] = random_tensors(QWEN)["lm_head.weight"]
    with pytest.raises(CheckpointError, match="embed_tokens"):  # a table that is only a table is never quantised
        Checkpoint.open(write(tmp_path / "untied", QWEN, tensors))


def test_f12_router_bias_keeps_its_float32_bits(tmp_path: Path) -> None:
    name = "backbone.layers.3.mixer.gate.e_score_correction_bias"
    tensors = random_tensors(NEMOTRON)
    tensors[name] = np.array([0.7, 0.7000001, 0.70000005, 0.6999999], np.float32)  # equal once rounded to BF16
    assert len(set(tensors[name].astype(BF16).tolist())) == 1
    write(tmp_path / "source", NEMOTRON, tensors)
    quantize(tmp_path / "source", tmp_path / "quantised", recipe="dense")
    for directory in (tmp_path / "source", tmp_path / "quantised"):
        with Checkpoint.open(directory) as checkpoint:
            assert checkpoint.vector(name).tobytes() == tensors[name].tobytes() and checkpoint.notes() == []
    tensors[name] = tensors[name].astype(BF16)
    with Checkpoint.open(write(tmp_path / "bf16", NEMOTRON, tensors)) as checkpoint:
        assert name in checkpoint.notes()[0]


def test_f14_leftovers_stay_unquantised_and_load(tmp_path: Path) -> None:
    write(tmp_path / "source", QWEN_MOE, random_tensors(QWEN_MOE))
    quantize(tmp_path / "source", tmp_path / "dst", recipe="dense")
    with Checkpoint.open(tmp_path / "dst") as checkpoint:
        gate = checkpoint.matrix("model.layers.0.mlp.shared_expert_gate.weight")
        assert gate.shape == (1, 32) and gate.format is MatrixFormat.BF16
        for name in ("model.layers.0.mlp.gate.weight", "lm_head.weight", "model.embed_tokens.weight", "mtp.fc.weight"):
            assert checkpoint.matrix(name).format is MatrixFormat.BF16
        assert checkpoint.matrix("model.layers.0.linear_attn.in_proj_a.weight").format is MatrixFormat.NVFP4


@pytest.mark.parametrize("leaf", ["dt_bias", "A_log", "D", "out_proj.weight"])
def test_e01_values_in_memory_are_the_bytes_of_the_file(leaf: str) -> None:
    directory = require_model("nemotron-tiny")
    content = (directory / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    with Checkpoint.open(directory) as checkpoint:
        names = [n for n in checkpoint.names() if n.endswith(f"mixer.{leaf}")]
        assert len(names) == 5
        header = json.loads(content[8:start])
        for name in names:
            begin, end = header[name]["data_offsets"]
            bits = np.frombuffer(content[start + begin : start + end], np.uint16).astype(np.uint32) << 16
            served = checkpoint.matrix(name).dequantize() if leaf.endswith("weight") else checkpoint.vector(name)
            np.testing.assert_array_equal(served.reshape(-1), bits.view(np.float32))


def test_quantised_parameters_that_never_are_quantised_are_named(tmp_path: Path) -> None:
    for name in ("model.layers.0.mlp.gate.weight", "model.layers.0.linear_attn.conv1d.weight", "model.norm.weight"):
        tensors = random_tensors(QWEN_MOE)
        tensors[name] = tensors[name].astype(E4M3)
        tensors[name + "_scale"] = np.asarray(1, np.float32)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ": expected dtype"):
            Checkpoint.open(write(tmp_path, QWEN_MOE, tensors))


def test_packed_quantised_experts_are_named(tmp_path: Path) -> None:
    tensors = {n: a for n, a in random_tensors(QWEN_MOE).items() if not n.startswith("model.layers.0.mlp.experts.")}
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = np.zeros((4, 32, 16), np.uint8)
    tensors["model.layers.0.mlp.experts.down_proj"] = np.zeros((4, 32, 8), np.uint8)
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj.*one by one"):
        Checkpoint.open(write(tmp_path, QWEN_MOE, tensors))
