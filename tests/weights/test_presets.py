"""The four public geometries reproduce the published counts of parameters, tensors and bytes."""

from __future__ import annotations

import math

import pytest

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.shapes import LayerKind
from trtllm_replayssm.weights.inspect import count_parameters, count_tensors, pattern_letters
from trtllm_replayssm.weights.presets import preset_config, preset_geometry, preset_names

SUPER = "nemotron-3-super-120b-a12b-nvfp4"
# FP8 modules of the published Super checkpoint, by layer
SUPER_IN_PROJ = [
    0,
    2,
    4,
    6,
    9,
    11,
    13,
    15,
    18,
    20,
    27,
    29,
    31,
    40,
    49,
    51,
    53,
    55,
    57,
    60,
    62,
    66,
    68,
    71,
    73,
    82,
    84,
    86,
]
SUPER_OUT_PROJ = [
    0,
    2,
    4,
    9,
    11,
    13,
    18,
    38,
    40,
    42,
    44,
    49,
    51,
    53,
    55,
    57,
    60,
    62,
    64,
    66,
    68,
    71,
    73,
    75,
    77,
    80,
    82,
    84,
    86,
]


def specs_of(name: str, *, mtp: bool) -> list[ParamSpec]:
    geometry = preset_geometry(name)
    return [s for s in model_of(geometry).parameters(geometry) if s.name.startswith("mtp.") == mtp]


@pytest.mark.parametrize(
    ("name", "main", "mtp"),
    [
        ("nemotron-3-nano-4b", 3_973_556_832, 0),
        (SUPER, 120_668_707_840, 2_942_325_248),
        ("qwen3.5-4b", 4_205_751_296, None),
        ("qwen3.5-122b-a10b-nvfp4", 122_111_526_912, None),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, main: int, mtp: int | None) -> None:
    assert count_parameters(specs_of(name, mtp=False)) == main
    if mtp is not None:
        assert count_parameters(specs_of(name, mtp=True)) == mtp


def test_tensor_counts_are_the_published_ones() -> None:
    assert count_tensors(specs_of("nemotron-3-nano-4b", mtp=False)) == 263
    assert count_tensors(specs_of("qwen3.5-4b", mtp=False)) == 426
    assert count_tensors(specs_of("qwen3.5-4b", mtp=True)) == 15
    qwen = [s for mtp in (False, True) for s in specs_of("qwen3.5-122b-a10b-nvfp4", mtp=mtp)]
    nvfp4 = sum(s.shape[0] for s in qwen if s.recipe == "experts")
    assert nvfp4 == 36_864
    assert count_tensors(qwen) + 3 * nvfp4 == 148_976  # weight_scale, weight_scale_2, input_scale


def test_super_tensors_and_bytes_are_the_published_ones() -> None:
    geometry = preset_geometry(SUPER)
    moe = geometry.layers_of(LayerKind.MOE)
    fp8 = {f"backbone.layers.{i}.mixer.in_proj.weight" for i in SUPER_IN_PROJ}
    fp8 |= {f"backbone.layers.{i}.mixer.out_proj.weight" for i in SUPER_OUT_PROJ}
    fp8 |= {f"backbone.layers.{i}.mixer.shared_experts.up_proj.weight" for i in moe if i != 41}
    fp8 |= {f"backbone.layers.{i}.mixer.shared_experts.down_proj.weight" for i in moe if i not in (1, 8, 76)}
    fp8 |= {f"backbone.layers.{i}.mixer.fc1_latent_proj.weight" for i in (1, 3, 5)}
    fp8 |= {"backbone.layers.3.mixer.fc2_latent_proj.weight"}
    fp8 |= {f"backbone.layers.{i}.mixer.o_proj.weight" for i in (69, 78)}
    nvfp4 = {"backbone.layers.1.mixer.shared_experts.down_proj.weight"}
    tensors = stored = matrices = found = 0
    for spec in model_of(geometry).parameters(geometry):
        count = spec.shape[0] if spec.role is ParamRole.EXPERTS else 1
        elems = math.prod(spec.shape)
        if spec.name in fp8:
            tensors, stored, found = tensors + 3, stored + elems + 8, found + 1
        elif spec.name in nvfp4 or spec.recipe == "experts":
            tensors, stored, matrices = tensors + 4 * count, stored + elems * 9 // 16 + 8 * count, matrices + count
        else:
            width = 4 if spec.name.endswith("correction_bias") else 2
            tensors, stored = tensors + count, stored + width * elems
    kv_scales = 2 * len(geometry.layers_of(LayerKind.ATTENTION))
    assert (found, matrices) == (len(fp8), 40_961) == (139, 40_961)
    assert tensors + kv_scales == 165_860
    assert stored + 4 * kv_scales == 80_297_329_824


def test_layer_patterns() -> None:
    nano = preset_geometry("nemotron-3-nano-4b")
    assert pattern_letters(nano.layers) == "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
    assert nano.layers_of(LayerKind.ATTENTION) == (12, 17, 24, 32)
    big = preset_geometry(SUPER)
    assert big.layers_of(LayerKind.ATTENTION) == (7, 16, 25, 36, 47, 58, 69, 78)
    assert pattern_letters(big.mtp_pattern) == "*E" and big.eos_ids == (2, 11)
    assert pattern_letters(preset_geometry("qwen3.5-4b").layers) == "MMM*" * 8
    assert pattern_letters(preset_geometry("qwen3.5-122b-a10b").layers) == "MMM*" * 12


def test_names_work_with_and_without_the_suffix() -> None:
    assert len(preset_names()) == 4
    for name in preset_names():
        geometry = preset_geometry(name)
        assert geometry.name == name
        for spelling in (name.removesuffix("-nvfp4"), name.removesuffix("-nvfp4") + "-nvfp4", name.upper()):
            assert preset_geometry(spelling) == geometry
        assert preset_config(name)["architectures"]
    with pytest.raises(ConfigError, match="nemotron-3-nano-4b"):
        preset_geometry("nemotron-3-nano-30b")
