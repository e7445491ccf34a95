"""Small random checkpoints of both families, written with the safetensors library; and a second NVFP4 encoder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.weights.hf_config import parse_config

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
CODES = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Tensors = dict[str, NDArray[Any]]

NEMOTRON = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "num_hidden_layers": 4, "hidden_size": 32,
    "vocab_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
    "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, math.inf],
    "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "moe_latent_size": 16, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 32, "vocab_size": 48, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "eos_token_id": 3, "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}  # fmt: skip
QWEN_MOE = {
    **{key: value for key, value in QWEN.items() if key != "intermediate_size"}, "model_type": "qwen3_5_moe_text",
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32,
}  # fmt: skip


def random_tensors(config: dict[str, Any], seed: int = 0) -> Tensors:
    """BF16 values for every parameter of the model by canonical name, experts one by one; router bias in float32."""
    rng = np.random.default_rng(seed)
    geometry = parse_config(config)
    tensors: Tensors = {}
    for spec in model_of(geometry).parameters(geometry):
        values = rng.standard_normal(spec.shape).astype(np.float32)
        if spec.role is ParamRole.EXPERTS:
            block, projection = spec.name.rsplit(".", 1)
            for e, expert in enumerate(values):
                tensors[f"{block}.{e}.{projection}.weight"] = expert.astype(BF16)
        else:
            tensors[spec.name] = values if spec.name.endswith("correction_bias") else values.astype(BF16)
    return tensors


def write(directory: Path, config: dict[str, Any], tensors: Tensors, *, quant: dict[str, Any] | None = None) -> Path:
    """A checkpoint with one weight file; `quant` becomes hf_quant_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if quant is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(quant))
    save_file(tensors, directory / "model.safetensors")
    return directory


def to_nvfp4(tensors: Tensors, weight: str, *, input_scale: float | None = None) -> None:
    """Replace one weight by its NVFP4 form."""
    base = weight.removesuffix("weight")
    packed, scale, scale_2 = encode_by_search(tensors.pop(weight).astype(np.float64))
    tensors.update({weight: packed, base + "weight_scale": scale, base + "weight_scale_2": np.asarray(scale_2)})
    if input_scale is not None:
        tensors[base + "input_scale"] = np.asarray(input_scale, np.float32)


def to_fp8(tensors: Tensors, weight: str, *, per_row: bool = False, flat: bool = False) -> None:
    """Replace one weight by its FP8 form, with one scale or one per row ([N, 1], or [N] when `flat`)."""
    values = tensors[weight].astype(np.float32)
    amax = np.abs(values).max(axis=1, keepdims=True) if per_row else np.abs(values).max()
    scale = np.asarray(amax / np.float32(448), np.float32)
    tensors[weight] = (values / scale).astype(E4M3)
    tensors[weight + "_scale"] = scale.reshape(-1) if flat else scale


def encode_by_search(values: NDArray[np.float64]) -> tuple[NDArray[np.uint8], NDArray[Any], np.float32]:
    """NVFP4 the slow way: for each element the distances to all 16 values, the even code on a tie."""
    scale_2 = np.float32(np.float32(np.abs(values).max()) / np.float32(2688))
    rows, columns = values.shape
    packed = np.zeros((rows, columns // 2), np.uint8)
    scales = np.zeros((rows, columns // 16), E4M3)
    for row in range(rows):
        for block in range(columns // 16):
            part = values[row, 16 * block : 16 * block + 16]
            amax = np.float32(np.abs(part).max())
            wanted = amax / np.float32(np.float32(6) * scale_2)
            scales[row, block] = E4M3(1.0) if amax == 0 else E4M3(min(max(wanted, np.float32(2**-9)), np.float32(448)))
            step = np.float32(scales[row, block]) * scale_2
            for i, value in enumerate(part):
                quotient = float(np.float32(value) / step)
                codes = range(8, 16) if quotient < 0 else range(8)
                code = min(codes, key=lambda c: (abs(CODES[c] - quotient), c % 2))
                packed[row, 8 * block + i // 2] |= code << (4 * (i % 2))
    return packed, scales, scale_2


def decode_by_hand(packed: NDArray[np.uint8], scale: NDArray[Any], scale_2: float) -> NDArray[np.float64]:
    """NVFP4 -> float64, one element at a time."""
    out = np.zeros((packed.shape[0], 2 * packed.shape[1]))
    for row, column in np.ndindex(*out.shape):
        nibble = int(packed[row, column // 2]) >> (4 * (column % 2)) & 15
        out[row, column] = CODES[nibble] * float(scale[row, column // 16]) * float(scale_2)
    return out
