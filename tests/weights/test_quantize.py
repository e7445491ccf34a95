"""quantize(): what is written, what is left alone, and that nothing half-done remains."""

from __future__ import annotations

import json
import tracemalloc
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paths import EXAMPLES, require_model
from tests.weights.small_models import (
    BF16,
    NEMOTRON,
    QWEN_MOE,
    Tensors,
    decode_by_hand,
    encode_by_search,
    random_tensors,
    to_nvfp4,
    write,
)
from tests.weights.test_checkpoint import pack_experts, renamed
from trtllm_replayssm.builders import quantize_encode
from trtllm_replayssm.builders.quantize import quantize
from trtllm_replayssm.builders.quantize_config import excluded_patterns
from trtllm_replayssm.errors import CheckpointError, ConfigError
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import Fp8Matrix, MatrixFormat, Nvfp4Matrix
from trtllm_replayssm.weights.safetensors_file import SafetensorsFile

EXPERTS = "model.layers.0.mlp.experts"


def stored(directory: Path) -> Tensors:
    """Every tensor of a directory's weight files."""
    return {n: t.array() for path in directory.glob("*.safetensors") for n, t in SafetensorsFile(path).tensors.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Qwen MoE checkpoint under its public prefix, experts packed, with a vision tensor and a tokenizer."""
    tensors = renamed(pack_experts(random_tensors(QWEN_MOE), fuse=True), ("model.", "model.language_model."))
    tensors["model.visual.patch_embed.proj.weight"] = np.ones((2, 3), BF16)
    directory = write(tmp_path / "source", {"model_type": "qwen3_5_moe", "text_config": QWEN_MOE}, tensors)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "old.bin").write_bytes(b"weights of another format")
    return directory


def test_round_trip_equals_decoding_the_files_bytes_by_hand(source: Path, tmp_path: Path) -> None:
    report = quantize(source, tmp_path / "dst", recipe="dense")
    raw, original = stored(tmp_path / "dst"), random_tensors(QWEN_MOE)
    with Checkpoint.open(tmp_path / "dst") as checkpoint:
        assert checkpoint.notes() == []
        checked = 0
        for name in checkpoint.matrix_names():
            stack = checkpoint.experts(name) if ".experts." in name else None
            for e in range(len(stack) if stack else 1):
                matrix = stack.matrix(e) if stack else checkpoint.matrix(name)
                canonical = name if stack is None else f"{name.rsplit('.', 1)[0]}.{e}.{name.rsplit('.', 1)[1]}.weight"
                if not isinstance(matrix, Nvfp4Matrix):
                    np.testing.assert_array_equal(matrix.dequantize(), original[canonical].astype(np.float32))
                    continue
                base = canonical.replace("model.", "model.language_model.").removesuffix(".weight")
                by_hand = decode_by_hand(
                    raw[base + ".weight"], raw[base + ".weight_scale"], float(raw[base + ".weight_scale_2"])
                )
                assert matrix.dequantize(np.float64).tobytes() == by_hand.tobytes()
                error = np.linalg.norm(by_hand - original[canonical]) / np.linalg.norm(original[canonical])
                assert 0.01 < error < 0.15
                checked += 1
        assert checked == len(report.quantised) == 24 + 4 + 5 + 6
    assert report.written_bytes == sum(array.nbytes for array in raw.values()) < report.source_bytes


def test_dense_matrices_are_the_search_result(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "dst")
    raw, original = stored(tmp_path / "dst"), random_tensors(QWEN_MOE)
    packed, scales, scale_2 = encode_by_search(original["model.layers.1.self_attn.q_proj.weight"].astype(np.float64))
    base = "model.language_model.layers.1.self_attn.q_proj.weight"
    assert raw[base].tobytes() == packed.tobytes() and raw[base + "_scale"].tobytes() == scales.tobytes()
    assert raw[base + "_scale_2"] == scale_2 and raw[base + "_scale_2"].shape == ()


def test_packed_and_single_experts_give_the_same_bytes_and_share_a_multiplier(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "packed", recipe="experts")
    write(tmp_path / "single", QWEN_MOE, random_tensors(QWEN_MOE))
    quantize(tmp_path / "single", tmp_path / "singles", recipe="experts")
    packed = renamed(stored(tmp_path / "packed"), ("model.language_model.", "model."))
    singles = stored(tmp_path / "singles")
    experts = [name for name in singles if name.startswith(EXPERTS)]
    assert len(experts) == 4 * 3 * 3 and f"{EXPERTS}.gate_up_proj" not in packed
    for name in experts:
        assert packed[name].tobytes() == singles[name].tobytes()
    multipliers = set()
    for e in range(4):
        gate, up, down = (singles[f"{EXPERTS}.{e}.{p}_proj.weight_scale_2"] for p in ("gate", "up", "down"))
        assert gate == up != down
        multipliers.add(float(gate))
    assert len(multipliers) > 1  # of one expert, not of all


def test_everything_else_is_copied_bit_for_bit(source: Path, tmp_path: Path) -> None:
    report = quantize(source, tmp_path / "dst", recipe="experts")
    before, after = stored(source), stored(tmp_path / "dst")
    replaced = {name for name in before if ".experts." in name and not name.startswith("mtp.")}
    assert before.keys() - after.keys() == replaced
    for name in before.keys() - replaced:
        assert (before[name].dtype, before[name].tobytes()) == (after[name].dtype, after[name].tobytes())
    assert set(report.quantised.values()) == {MatrixFormat.NVFP4} and len(report.quantised) == 24
    assert report.copied == ("tokenizer.json",) and report.files == ("model.safetensors",)
    assert sorted(p.name for p in (tmp_path / "dst").iterdir()) == [
        "config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_configs_name_the_algorithm_and_the_excluded(source: Path, tmp_path: Path) -> None:
    report = quantize(source, tmp_path / "dst", recipe="experts")
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    in_file = json.loads((tmp_path / "dst" / "hf_quant_config.json").read_text())["quantization"]
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", "NVFP4")
    assert (in_file["quant_algo"], in_file["group_size"], in_file["kv_cache_quant_algo"]) == ("NVFP4", 16, None)
    assert quantization["ignore"] == in_file["exclude_modules"]
    patterns = in_file["exclude_modules"]
    for module in (
        "lm_head",
        "mtp.fc",
        "model.language_model.layers.0.mlp.gate",
        "mtp.layers.0.mlp.experts.gate_up_proj",
    ):
        assert any(fnmatchcase(module, pattern) for pattern in patterns)
    for module in report.quantised:
        assert not any(fnmatchcase(module, pattern) for pattern in patterns)


def test_fp8_modules_make_it_mixed_precision(tmp_path: Path) -> None:
    write(tmp_path / "source", NEMOTRON, random_tensors(NEMOTRON))
    mamba = "backbone.layers.0.mixer."
    report = quantize(tmp_path / "source", tmp_path / "dst", recipe="experts", fp8=["*.in_proj", mamba + "out_proj"])
    assert {n for n, kind in report.quantised.items() if kind is MatrixFormat.FP8} == {
        mamba + "in_proj",
        mamba + "out_proj",
    }
    with Checkpoint.open(tmp_path / "dst") as checkpoint:
        assert checkpoint.notes() == [] and checkpoint.quantization is not None
        assert checkpoint.quantization.algorithm == "MIXED_PRECISION"
        assert checkpoint.quantization.layers[mamba + "in_proj"] == "FP8" and len(checkpoint.quantization.layers) == 10
        assert checkpoint.matrix(mamba + "in_proj.weight").format is MatrixFormat.FP8
        assert checkpoint.matrix("backbone.layers.1.mixer.up_proj.weight").format is MatrixFormat.BF16
        original = random_tensors(NEMOTRON)[mamba + "in_proj.weight"].astype(np.float64)
        matrix = checkpoint.matrix(mamba + "in_proj.weight")
        assert isinstance(matrix, Fp8Matrix)
        difference = np.abs(matrix.dequantize(np.float64) - original)
        assert 0 < difference.max() <= 16 * float(matrix.scale)  # half a step of E4M3 between 256 and 448


def test_fp8_patterns_match_canonical_names_and_single_experts(source: Path, tmp_path: Path) -> None:
    report = quantize(
        source, tmp_path / "dst", recipe="experts",
        fp8=["model.layers.0.linear_attn.out_proj", "model.layers.1.mlp.experts.3.down_proj"],
    )  # fmt: skip
    prefix = "model.language_model.layers."
    fp8 = {n for n, kind in report.quantised.items() if kind is MatrixFormat.FP8}
    assert fp8 == {prefix + "0.linear_attn.out_proj", prefix + "1.mlp.experts.3.down_proj"}
    with Checkpoint.open(tmp_path / "dst") as checkpoint:
        stack = checkpoint.experts("model.layers.1.mlp.experts.down_proj")
        assert [stack.matrix(e).format.value for e in range(4)] == ["nvfp4"] * 3 + ["fp8"]


def test_fp8_needs_no_blocks_but_packed_experts_only_change_together(tmp_path: Path) -> None:
    config = {**QWEN_MOE, "moe_intermediate_size": 24}  # down_proj has 24 columns
    write(tmp_path / "source", config, pack_experts(random_tensors(config), fuse=True))
    report = quantize(
        tmp_path / "source", tmp_path / "dst", recipe="experts", fp8=["*.layers.?.mlp.experts.*.down_proj"]
    )
    assert report.left == {} and report.quantised[f"{EXPERTS}.0.down_proj"] is MatrixFormat.FP8
    Checkpoint.open(tmp_path / "dst").close()
    with pytest.raises(ConfigError, match=r"the packed model\.layers\.0\.mlp\.experts\.down_proj"):
        quantize(tmp_path / "source", tmp_path / "part", recipe="experts", fp8=[f"{EXPERTS}.0.down_proj"])


def test_excluded_patterns_never_match_a_quantised_module() -> None:
    patterns = excluded_patterns(["a.0.x", "a.1.y"], ["a.1.x", "a.2.z", "a.3.z", "b"])
    assert patterns == ["a.*.z", "a.1.x", "b"]


def test_infinity_survives_in_config_json(tmp_path: Path) -> None:
    write(tmp_path / "source", NEMOTRON, random_tensors(NEMOTRON))
    quantize(tmp_path / "source", tmp_path / "dst")
    assert "Infinity" in (tmp_path / "dst" / "config.json").read_text()
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["time_step_limit"] == [0.0, float("inf")]


def test_matrices_whose_columns_fill_no_block_are_left_and_reported(tmp_path: Path) -> None:
    config = {**NEMOTRON, "intermediate_size": 40, "moe_intermediate_size": 24}
    write(tmp_path / "source", config, random_tensors(config))
    report = quantize(tmp_path / "source", tmp_path / "dst")
    assert report.left["backbone.layers.1.mixer.down_proj"] == "40 columns are no multiple of 16"
    assert len(report.left) == 1 + 4 and "backbone.layers.1.mixer.up_proj" in report.quantised
    with Checkpoint.open(tmp_path / "dst") as checkpoint:
        assert checkpoint.matrix("backbone.layers.1.mixer.down_proj.weight").format is MatrixFormat.BF16


def test_shards_hold_every_tensor_once(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    whole = quantize(source, tmp_path / "whole")
    report = quantize(source, tmp_path / "dst", max_shard_bytes=9_000, progress=lambda *step: seen.append(step))
    count = len(report.files)
    assert count > 3 and report.files[0] == f"model-00001-of-{count:05}.safetensors"
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(report.files)
    assert index["metadata"]["total_size"] == report.written_bytes == whole.written_bytes
    one, many = stored(tmp_path / "whole"), stored(tmp_path / "dst")
    assert {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in many.items()}
    Checkpoint.open(tmp_path / "dst").close()
    done = [step[0] for step in seen]
    assert done == sorted(done) and done[-1] == seen[0][1] == report.written_bytes


def test_memory_is_bounded_by_one_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_encode, "_CHUNK_ELEMS", 1 << 12)
    config = {**QWEN_MOE, "num_experts": 16, "moe_intermediate_size": 2048}
    write(tmp_path / "source", config, pack_experts(random_tensors(config), fuse=True))
    tracemalloc.start()
    report = quantize(tmp_path / "source", tmp_path / "dst", recipe="experts")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.source_bytes > 12_000_000 and peak < 1_000_000


class StopError(Exception):
    """Raised by a test's callback."""


def test_a_failure_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise StopError

    before = sorted(tmp_path.iterdir())
    with pytest.raises(StopError):
        quantize(source, tmp_path / "dst", progress=stop)
    assert sorted(tmp_path.iterdir()) == before
    tensors = random_tensors(NEMOTRON)
    tensors["backbone.layers.0.mixer.in_proj.weight"][1, 2] = np.nan
    write(tmp_path / "nan", NEMOTRON, tensors)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mixer\.in_proj\.weight"):
        quantize(tmp_path / "nan", tmp_path / "deep" / "dst")
    assert list((tmp_path / "deep").iterdir()) == []


def test_the_destination_must_be_new_or_empty(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    quantize(source, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()
    (tmp_path / "file").write_text("")
    for taken in ("empty", "file"):
        with pytest.raises(ConfigError, match="destination"):
            quantize(source, tmp_path / taken)


def test_a_quantised_source_is_refused(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "once")
    with pytest.raises(CheckpointError, match="unquantised"):
        quantize(tmp_path / "once", tmp_path / "twice")
    said = write(tmp_path / "said", QWEN_MOE, random_tensors(QWEN_MOE), quant={"quant_algo": "NVFP4"})
    with pytest.raises(CheckpointError, match="NVFP4 in its configuration"):
        quantize(said, tmp_path / "twice")
    tensors = random_tensors(QWEN_MOE)
    to_nvfp4(tensors, f"{EXPERTS}.1.down_proj.weight")  # one matrix alone, and no configuration that says so
    with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj"):
        quantize(write(tmp_path / "mixed", QWEN_MOE, tensors), tmp_path / "twice")
    assert not (tmp_path / "twice").exists()


def test_settings_that_name_nothing_are_refused(source: Path, tmp_path: Path) -> None:
    for settings, key in (
        ({"recipe": "all"}, "recipe"),
        ({"fp8": ["*.in_proj"]}, "fp8"),
        ({"fp8": ["lm_head"]}, "fp8"),
    ):
        with pytest.raises(ConfigError, match=key):
            quantize(source, tmp_path / "dst", **settings)  # type: ignore[arg-type]
    dense = {**NEMOTRON, "hybrid_override_pattern": "M-*", "num_hidden_layers": 3}
    with pytest.raises(ConfigError, match="recipe"):
        quantize(write(tmp_path / "dense", dense, random_tensors(dense)), tmp_path / "dst", recipe="experts")


@pytest.mark.parametrize("name", ["qwen3_5-tiny", "nemotron-tiny"])
def test_bundled_examples_are_what_the_originals_quantise_to(name: str, tmp_path: Path) -> None:
    example = EXAMPLES / f"{name}-nvfp4"
    quantize(require_model(name), tmp_path / "dst", recipe="dense")
    for file in ("model.safetensors", "config.json", "hf_quant_config.json", "tokenizer.json"):
        left, right = (tmp_path / "dst" / file).read_bytes(), (example / file).read_bytes()
        if file == "model.safetensors":
            assert left == right
        else:
            assert without_producer(left) == without_producer(right)


def without_producer(content: bytes) -> Any:
    parsed = json.loads(content)
    for keys in (parsed, parsed.get("quantization_config", {})):
        keys.pop("producer", None)
    return parsed


@pytest.mark.parametrize(("name", "mtp"), [("qwen3_5-tiny", 1), ("nemotron-tiny", 0)])
def test_bundled_examples_open(name: str, mtp: int) -> None:
    with Checkpoint.open(EXAMPLES / f"{name}-nvfp4") as checkpoint:
        assert checkpoint.notes() == [] and checkpoint.unused() == []
        assert len(checkpoint.geometry.mtp_pattern) == mtp
        for matrix_name in checkpoint.matrix_names():
            assert np.isfinite(checkpoint.matrix(matrix_name).dequantize()).all()
