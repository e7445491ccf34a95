"""The matrices that the layer benchmark multiplies with: those of the models, alone and joined."""

from __future__ import annotations

from trtllm_replayssm.bench.layers import product_shapes
from trtllm_replayssm.weights.presets import preset_geometry


def test_products_of_the_dense_models() -> None:
    nano = product_shapes(preset_geometry("nemotron-3-nano-4b"))
    assert nano[(17504, 3136)] == "mixer.in_proj" and nano[(131072, 3136)] == "lm_head"
    assert nano[(5120 + 2 * 1024, 3136)] == "mixer.q_proj and others"
    qwen = product_shapes(preset_geometry("qwen3.5-4b"))
    assert qwen[(8192 + 4096 + 2 * 32, 2560)] == "linear_attn.in_proj_qkv and others"
    assert qwen[(2 * 9216, 2560)] == "mlp.gate_proj and others"


def test_experts_and_routers_are_no_dense_products() -> None:
    geometry = preset_geometry("qwen3.5-122b-a10b-nvfp4")
    assert geometry.moe is not None
    shapes = product_shapes(geometry)
    assert (geometry.moe.experts, geometry.hidden) not in shapes
    assert shapes[(2 * geometry.moe.shared_intermediate, geometry.hidden)] == "shared_expert.gate_proj and others"
