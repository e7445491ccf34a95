"""Keys of a `qwen3_5` or `qwen3_5_moe` text configuration -> ModelGeometry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_replayssm.shapes import (
    AttentionShape,
    Family,
    LayerKind,
    ModelGeometry,
    MoeShape,
    Router,
    SsmKind,
    SsmShape,
)
from trtllm_replayssm.weights.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader, shown

_WORDS = {
    "linear_attention": LayerKind.SSM,
    "mamba": LayerKind.SSM,
    "full_attention": LayerKind.ATTENTION,
    "attention": LayerKind.ATTENTION,
}


def qwen_geometry(keys: ConfigReader, **common: Any) -> ModelGeometry:
    """The geometry; `common` holds the fields that all families share."""
    _check_fixed(keys)
    has_experts = keys.raw("num_experts", default=None) is not None
    layers = _layers(keys)
    return ModelGeometry(
        family=Family.QWEN3_5,
        hidden=keys.integer("hidden_size"),
        vocab=keys.integer("vocab_size"),
        layers=layers,
        ssm=SsmShape(
            kind=SsmKind.GDN,
            heads=keys.integer("linear_num_value_heads"),
            groups=keys.integer("linear_num_key_heads"),
            head_dim=keys.integer("linear_value_head_dim"),
            state_dim=keys.integer("linear_key_head_dim"),
            conv_kernel=keys.integer("linear_conv_kernel_dim", minimum=2),
            conv_bias=False,
        ),
        attention=_attention(keys),
        mlp_intermediate=0 if has_experts else keys.integer("intermediate_size"),
        moe=_moe(keys) if has_experts else None,
        norm_eps=keys.number("rms_norm_eps"),
        max_positions=keys.integer("max_position_embeddings"),
        mtp_pattern=(LayerKind.ATTENTION,)
        * keys.integer("mtp_num_hidden_layers", default=0, minimum=0, maximum=MAX_LAYERS),
        **common,
    )


def _check_fixed(keys: ConfigReader) -> None:
    """Keys whose other values would change the equations."""
    model_type = keys.string("model_type", default=None)
    if model_type is not None and ("moe" in model_type) != ("num_experts" in keys.keys):
        raise keys.error("num_experts", "present in the moe variants and only there", f"model_type {shown(model_type)}")
    keys.only("attn_output_gate", allowed=(True,))
    keys.only("attention_bias", allowed=(False,))
    keys.only("hidden_act", allowed=("silu", "swish"))
    keys.only("output_gate_type", allowed=("silu", "swish"))
    keys.only("sliding_window", allowed=())
    keys.only("use_sliding_window", allowed=(False,))
    keys.only("mtp_use_dedicated_embeddings", allowed=(False,))


def _layers(keys: ConfigReader) -> tuple[LayerKind, ...]:
    """layer_types or layers_block_type; else every `full_attention_interval`-th layer is attention."""
    count = keys.integer("num_hidden_layers", default=None, maximum=MAX_LAYERS)
    words = keys.strings("layer_types", "layers_block_type", default=None)
    if words is None:
        if count is None:
            raise keys.error("num_hidden_layers", "a value", "no such key")
        interval = keys.integer("full_attention_interval")
        return tuple(LayerKind.SSM if (i + 1) % interval else LayerKind.ATTENTION for i in range(count))
    if len(words) > MAX_LAYERS:
        raise keys.error("layer_types", f"at most {MAX_LAYERS} layers", len(words))
    for word in words:
        if word not in _WORDS:
            raise keys.error("layer_types", f"layers out of {sorted(_WORDS)}", shown(word))
    if count not in (None, len(words)):
        raise keys.error("num_hidden_layers", f"{len(words)}, the length of layer_types", count)
    return tuple(_WORDS[word] for word in words)


def _attention(keys: ConfigReader) -> AttentionShape:
    """Attention sizes; rotary keys are in `rope_parameters`, in older files `rope_theta` and `rope_scaling`."""
    head_dim = keys.integer("head_dim")
    scaling = keys.raw("rope_parameters", "rope_scaling", default={})
    if not isinstance(scaling, Mapping):
        raise keys.error("rope_parameters", "an object", shown(scaling))
    rope = ConfigReader({**keys.keys, **scaling})
    rope.only("rope_type", "type", allowed=("default",), hint="Scaled rotary embeddings are not implemented")
    rotary = rope.number("partial_rotary_factor", maximum=1.0) * head_dim
    if rotary != int(rotary):
        raise keys.error("partial_rotary_factor", f"a fraction of head_dim={head_dim}", rotary / head_dim)
    return AttentionShape(
        heads=keys.integer("num_attention_heads"),
        kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(rotary),
        rope_theta=rope.number("rope_theta"),
    )


def _moe(keys: ConfigReader) -> MoeShape:
    keys.only("norm_topk_prob", allowed=(True,))
    keys.only("decoder_sparse_step", allowed=(1,))
    keys.only("mlp_only_layers", allowed=([],))
    return MoeShape(
        experts=keys.integer("num_experts", maximum=MAX_EXPERTS),
        top_k=keys.integer("num_experts_per_tok"),
        intermediate=keys.integer("moe_intermediate_size"),
        latent=None,
        shared_intermediate=keys.integer("shared_expert_intermediate_size"),
        gated=True,
        shared_gated=True,
        router=Router.SOFTMAX,
    )
