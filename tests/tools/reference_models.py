"""Configurations of the small random checkpoints in tests/checkpoints, and how their parameters are drawn.

Needs transformers and torch. Sizes are tiny but keep every distinction of the real models: d_v differs from d_k, heads
differ from groups, head_dim * heads differs from hidden, every kind of layer occurs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

VOCAB = 256
HIDDEN = 64

_NEMOTRON = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5,
    # transformers clamps dt from below in its one-shot forward only; the family's equations do not (0 is refused there)
    "time_step_min": 1e-30,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NEMOTRON_MOE = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
_QWEN_TEXT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
    "eos_token_id": 2,
}  # fmt: skip
_QWEN_WRAPPER = {
    "vision_config": {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": HIDDEN,
        "num_position_embeddings": 4, "patch_size": 2,
    },
    "image_token_id": 252, "video_token_id": 253, "vision_start_token_id": 254, "vision_end_token_id": 255,
}  # fmt: skip


def _nemotron(pattern: str, **extra: Any) -> PreTrainedModel:
    return NemotronHForCausalLM(NemotronHConfig(**_NEMOTRON, hybrid_override_pattern=pattern, **extra))


def _qwen_dense() -> PreTrainedModel:
    text = {**_QWEN_TEXT, "intermediate_size": 96, "tie_word_embeddings": True}
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, tie_word_embeddings=True, **_QWEN_WRAPPER)
    )


def _qwen_moe() -> PreTrainedModel:
    text = {
        **_QWEN_TEXT, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=text, tie_word_embeddings=False, **_QWEN_WRAPPER)
    )


def makers() -> dict[str, Callable[[], PreTrainedModel]]:
    """Directory name -> function that builds the model in float32 with the library's own initialisation."""
    return {
        "nemotron-dense": lambda: _nemotron("M-M*-"),
        "nemotron-moe": lambda: _nemotron("ME*EM", moe_latent_size=32, **_NEMOTRON_MOE),
        "nemotron-moe-groups": lambda: _nemotron("ME*E", n_group=2, topk_group=1, **_NEMOTRON_MOE),
        "qwen-dense": _qwen_dense,
        "qwen-moe": _qwen_moe,
    }


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter, and the router's bias buffer, far from its neutral value: a dropped term must show."""
    rng = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor, scale: float, mean: float = 0.0) -> torch.Tensor:
        return mean + scale * torch.randn(like.shape, generator=rng)

    with torch.no_grad():
        for name, tensor in _stored(model).items():
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "A_log":  # A from -0.2 to -4.5: heads that forget at once and heads that remember
                tensor.copy_(3.0 * torch.rand(tensor.shape, generator=rng) - 1.5)
            elif leaf in ("dt_bias", "D"):
                tensor.copy_(normal(tensor, 0.7, mean=float(leaf == "D")))
            elif leaf == "e_score_correction_bias":
                tensor.copy_(normal(tensor, 0.3))
            elif "norm" in name and tensor.dim() == 1 and leaf == "weight":
                # a norm that multiplies by 1 + weight is initialised to zeros, one that multiplies by weight to ones
                tensor.copy_(normal(tensor, 0.3, mean=tensor.mean().round().item()))
            elif "conv1d" in name:
                tensor.copy_(normal(tensor, 0.5))
            elif tensor.dim() >= 2:
                tensor.copy_(normal(tensor, 1.5 * tensor.shape[-1] ** -0.5))
            else:
                tensor.copy_(normal(tensor, 0.2))


def to_storage_types(model: PreTrainedModel) -> None:
    """Round to the types of the public files: BF16, but F32 for the router's bias and the dense Qwen's A_log."""
    keeps_a_log = isinstance(model, Qwen3_5ForConditionalGeneration)
    for name, tensor in _stored(model).items():
        wide = name.endswith("e_score_correction_bias") or (keeps_a_log and name.endswith("A_log"))
        tensor.data = tensor.data.to(torch.float32 if wide else torch.bfloat16)


def _stored(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by their name in memory, in a fixed order; a tied one occurs once."""
    persistent = model.state_dict().keys()
    tensors = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in persistent}}
    return dict(sorted(tensors.items()))
