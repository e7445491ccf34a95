"""Bytes of parameters on a device: against what sessions hold, and what a step must read."""

from __future__ import annotations

import pytest

from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.weights.inspect import count_parameters
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.precision_maps import published_format
from trtllm_replayssm.weights.presets import preset_geometry, preset_names, slice_geometry
from trtllm_replayssm.weights.sizes import model_bytes, step_parameters, step_weight_bytes, stored_bytes

SUPER = "nemotron-3-super-120b-a12b-nvfp4"


def formats(preset: str):  # type: ignore[no-untyped-def]
    return lambda name: published_format(preset, name)


@pytest.mark.parametrize(
    ("fmt", "size"), [(MatrixFormat.BF16, 4096), (MatrixFormat.F32, 8192), (MatrixFormat.FP8, 2048),
                      (MatrixFormat.NVFP4, 1024 + 128)],
)  # fmt: skip
def test_stored_bytes_count_elements_and_block_scales(fmt: MatrixFormat, size: int) -> None:
    assert stored_bytes((2, 16, 64), fmt) == size


def test_a_dense_model_takes_two_bytes_a_parameter() -> None:
    geometry = preset_geometry("nemotron-3-nano-4b")
    parameters = count_parameters(model_of(geometry).parameters(geometry))
    assert 2 * parameters < model_bytes(geometry, formats(geometry.name), 2) < 2.01 * parameters


def test_experts_of_the_large_presets_take_nvfp4_bytes() -> None:
    geometry = preset_geometry(SUPER)
    moe = geometry.moe
    assert moe is not None and moe.latent is not None
    one = 2 * moe.experts * moe.latent * moe.intermediate * 9 // 16
    main = slice_geometry(geometry, None, mtp=False)
    specs = model_of(main).parameters(main)
    others = sum(2 * count_parameters([s]) for s in specs if s.role is not ParamRole.EXPERTS)
    assert 40 * one + others < model_bytes(main, formats(SUPER), 2) < 40 * one + 1.02 * others  # routers are float32


@pytest.mark.parametrize("preset", preset_names())
def test_a_step_reads_no_more_than_the_model_holds(preset: str) -> None:
    geometry = slice_geometry(preset_geometry(preset), None, mtp=False)
    everything = model_bytes(geometry, formats(preset), 2)
    sizes = [step_weight_bytes(geometry, formats(preset), 2, tokens) for tokens in (1, 8, 64, 1024)]
    assert sizes == sorted(sizes) and sizes[-1] <= everything


def test_one_token_reads_its_chosen_experts_only() -> None:
    geometry = slice_geometry(preset_geometry(SUPER), (0, 1), mtp=False)  # one recurrent layer, one of experts
    assert geometry.moe is not None
    stack = sum(
        stored_bytes(s.shape, MatrixFormat.NVFP4)
        for s in model_of(geometry).parameters(geometry) if s.role is ParamRole.EXPERTS
    )  # fmt: skip
    one, many = (step_weight_bytes(geometry, formats(SUPER), 2, tokens) for tokens in (1, 10_000))
    table = geometry.vocab * geometry.hidden * 2
    assert many - one == pytest.approx(stack * (1 - 22 / 512) + table * (10_000 - 1) / geometry.vocab, rel=1e-6)


def products(preset: str, tokens: int) -> float:
    parameters = step_parameters(preset_geometry(preset), formats(preset), 2, tokens)
    return sum(parameter.multiplications for parameter in parameters)


def test_products_of_a_token() -> None:
    """A dense model multiplies with each matrix once; of the large one's experts 22 of 512 count."""
    nano = preset_geometry("nemotron-3-nano-4b")
    dense = [s for s in model_of(nano).parameters(nano) if s.role in (ParamRole.LINEAR, ParamRole.EMBEDDING)]
    embedding = nano.vocab * nano.hidden
    assert products("nemotron-3-nano-4b", 1) == count_parameters(dense) - embedding
    assert 11e9 < products(SUPER, 1) < 13.5e9  # the model's name: 12 billion active parameters
    assert products(SUPER, 300) == 300 * products(SUPER, 1)


def test_experts_are_read_as_a_whole_by_many_tokens_that_multiply_with_a_few() -> None:
    """Of Super at 256 tokens, at 4.2 TB/s and 780 TFLOP/s: experts are bound by bytes, other matrices by products."""
    geometry = slice_geometry(preset_geometry(SUPER), None, mtp=False)
    specs = [s for s in model_of(geometry).parameters(geometry) if not s.name.startswith("mtp.")]
    for spec, found in zip(specs, step_parameters(geometry, formats(SUPER), 2, 256), strict=True):
        reading, multiplying = found.read / 4.2e12, 2 * found.multiplications / 780e12
        if spec.role is ParamRole.EXPERTS:
            assert reading > 2 * multiplying > 0
        elif spec.role is ParamRole.LINEAR:
            assert multiplying > reading
