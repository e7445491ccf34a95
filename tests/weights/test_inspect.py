"""The summary of a geometry and of a checkpoint, against counts made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.weights.small_models import BF16, NEMOTRON, QWEN_MOE, random_tensors, to_fp8, to_nvfp4, write
from tests.weights.test_checkpoint import pack_experts
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.hf_config import parse_config
from trtllm_replayssm.weights.inspect import summarise
from trtllm_replayssm.weights.presets import preset_geometry


def test_a_geometry_is_summarised() -> None:
    summary = summarise(preset_geometry("nemotron-3-super-120b-a12b"))
    assert summary["parameters"] == {
        "main": 120_668_707_840, "mtp": 2_942_325_248, "total": 120_668_707_840 + 2_942_325_248,
    }  # fmt: skip
    assert summary["layers"] == {"ssm": 40, "attention": 8, "moe": 40} and summary["mtp_pattern"] == "*E"
    assert summary["layer_pattern"].startswith("MEMEMEM*E") and "bytes" not in summary
    assert json.loads(json.dumps(summary)) == summary


def test_a_checkpoint_is_summarised_by_format(tmp_path: Path) -> None:
    tensors = random_tensors(NEMOTRON)
    experts = [name for name in tensors if ".experts." in name]
    for name in experts:
        to_nvfp4(tensors, name, input_scale=1.0)
    to_fp8(tensors, "backbone.layers.0.mixer.in_proj.weight")
    tensors["model.visual.blocks.0.weight"] = np.zeros(4, BF16)
    tensors["model.visual.blocks.1.weight"] = np.zeros(4, BF16)
    with Checkpoint.open(write(tmp_path, NEMOTRON, tensors)) as checkpoint:
        summary = summarise(checkpoint)
    fp8 = tensors["backbone.layers.0.mixer.in_proj.weight"].nbytes + 4
    assert summary["bytes"]["fp8"] == fp8 and summary["bytes"]["f32"] == 4 * 4
    assert summary["bytes"]["nvfp4"] == sum(a.nbytes for n, a in tensors.items() if ".experts." in n)
    assert summary["bytes"]["total"] == sum(a.nbytes for a in tensors.values())
    parts = sum(summary["bytes"][kind] for kind in ("bf16", "f32", "fp8", "nvfp4"))
    assert parts == summary["bytes"]["total"] - 16  # the vision tensors
    assert summary["matrices"] == {"bf16": 14, "fp8": 1, "nvfp4": len(experts)} and summary["tensors"] == len(tensors)
    assert summary["unused"] == {
        "backbone.layers.*.mixer.experts.*.down_proj.input_scale": 4,
        "backbone.layers.*.mixer.experts.*.up_proj.input_scale": 4,
        "model.visual.blocks.*.weight": 2,
    }
    assert summary["quantisation"] is None and len(summary["notes"]) == 1
    assert json.loads(json.dumps(summary)) == summary


def test_packed_experts_count_once(tmp_path: Path) -> None:
    single, packed = random_tensors(QWEN_MOE), pack_experts(random_tensors(QWEN_MOE), fuse=True)
    summaries = []
    for kind, tensors in (("single", single), ("packed", packed)):
        with Checkpoint.open(write(tmp_path / kind, QWEN_MOE, tensors)) as checkpoint:
            summaries.append(summarise(checkpoint))
    assert summaries[0]["bytes"] == summaries[1]["bytes"] and summaries[0]["matrices"] == summaries[1]["matrices"]
    assert summaries[0]["parameters"] == summarise(parse_config(QWEN_MOE))["parameters"]
    assert summaries[0]["parameters"]["total"] * 2 == summaries[0]["bytes"]["total"]
