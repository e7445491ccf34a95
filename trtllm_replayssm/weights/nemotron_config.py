"""Keys of a `nemotron_h` config.json -> ModelGeometry."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

_LETTERS = {"M": LayerKind.SSM, "*": LayerKind.ATTENTION, "-": LayerKind.MLP, "E": LayerKind.MOE}
_WORDS = {
    "mamba": LayerKind.SSM,
    "linear_attention": LayerKind.SSM,
    "attention": LayerKind.ATTENTION,
    "full_attention": LayerKind.ATTENTION,
    "mlp": LayerKind.MLP,
    "moe": LayerKind.MOE,
}
_LAYER_KEYS = ("hybrid_override_pattern", "layers_block_type", "layer_types")
_MTP_KEYS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
_BIASES = ("use_bias", "mamba_proj_bias", "mlp_bias", "attention_bias")


def nemotron_geometry(keys: ConfigReader, **common: Any) -> ModelGeometry:
    """The geometry; `common` holds the fields that all families share."""
    _check_fixed(keys)
    layers = _pattern(keys, _LAYER_KEYS)
    count = keys.integer("num_hidden_layers", default=len(layers))
    if count != len(layers):
        raise keys.error("num_hidden_layers", f"{len(layers)}, the length of the layer pattern", count)
    mtp = _mtp_pattern(keys)
    used = set(layers) | set(mtp)
    intermediate = keys.integer("intermediate_size") if LayerKind.MLP in used else 0
    return ModelGeometry(
        family=Family.NEMOTRON_H,
        hidden=keys.integer("hidden_size"),
        vocab=keys.integer("vocab_size"),
        layers=layers,
        ssm=SsmShape(
            kind=SsmKind.MAMBA2,
            heads=keys.integer("mamba_num_heads"),
            groups=keys.integer("n_groups", "mamba_n_groups"),
            head_dim=keys.integer("mamba_head_dim"),
            state_dim=keys.integer("ssm_state_size"),
            conv_kernel=keys.integer("conv_kernel", "mamba_d_conv", minimum=2),
            conv_bias=keys.boolean("use_conv_bias", "mamba_conv_bias", default=True),
        ),
        attention=AttentionShape(
            heads=keys.integer("num_attention_heads"),
            kv_heads=keys.integer("num_key_value_heads"),
            head_dim=keys.integer("head_dim", "attention_head_dim"),
        ),
        mlp_intermediate=intermediate,
        moe=_moe(keys) if LayerKind.MOE in used else None,
        norm_eps=keys.number("layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
        max_positions=keys.integer("max_position_embeddings"),
        mtp_pattern=mtp,
        **common,
    )


def _check_fixed(keys: ConfigReader) -> None:
    """Keys whose other values would change the equations (rope keys are absent here: they are never applied)."""
    for bias in _BIASES:
        keys.only(bias, allowed=(False,))
    keys.only("mamba_hidden_act", allowed=("silu", "swish"))
    keys.only("mlp_hidden_act", allowed=("relu2",))
    keys.only("residual_in_fp32", allowed=(False,))
    keys.only("sliding_window", allowed=())
    limit = keys.raw("time_step_limit", "mamba_dt_limit", default=[0.0, math.inf])
    if not (isinstance(limit, Sequence) and list(limit) == [0.0, math.inf]):
        raise keys.error("time_step_limit", "[0, Infinity], which clamps nothing", shown(limit))


def _pattern(keys: ConfigReader, spellings: tuple[str, ...]) -> tuple[LayerKind, ...]:
    """Mixer kinds from a string of letters or a list of words; spellings present together must agree."""
    found: dict[str, tuple[LayerKind, ...]] = {}
    for key in spellings:
        value = keys.raw(key, default=None)
        if value is None:
            continue
        table = _LETTERS if isinstance(value, str) else _WORDS
        parts = keys.string(key) if isinstance(value, str) else keys.strings(key)
        if len(parts) > MAX_LAYERS:
            raise keys.error(key, f"at most {MAX_LAYERS} layers", len(parts))
        for part in parts:
            if part not in table:
                raise keys.error(key, f"layers out of {sorted(table)}", shown(part))
        found[key] = tuple(table[part] for part in parts)
    if not found or not all(found.values()):
        raise keys.error(" / ".join(spellings), "a layer pattern", "no such key" if not found else "an empty one")
    first, *others = found
    for other in others:
        if found[other] != found[first]:
            raise keys.error(other, f"the same layers as {first}", shown(keys.raw(other)))
    return found[first]


def _mtp_pattern(keys: ConfigReader) -> tuple[LayerKind, ...]:
    modules = keys.integer("num_nextn_predict_layers", default=0, minimum=0)
    if modules == 0:
        return ()
    if modules > 1:
        raise keys.error("num_nextn_predict_layers", "0 or 1 prediction module", modules)
    pattern = _pattern(keys, _MTP_KEYS)
    if not set(pattern) <= {LayerKind.ATTENTION, LayerKind.MLP, LayerKind.MOE}:
        raise keys.error(" / ".join(_MTP_KEYS), "layers without recurrent state", shown(keys.raw(*_MTP_KEYS)))
    return pattern


def _moe(keys: ConfigReader) -> MoeShape:
    keys.only("n_shared_experts", allowed=(1,))
    return MoeShape(
        experts=keys.integer("n_routed_experts", "num_local_experts", maximum=MAX_EXPERTS),
        top_k=keys.integer("num_experts_per_tok"),
        intermediate=keys.integer("moe_intermediate_size"),
        latent=keys.integer("moe_latent_size", default=None),
        shared_intermediate=keys.integer("moe_shared_expert_intermediate_size"),
        gated=False,
        shared_gated=False,
        router=Router.SIGMOID_BIAS,
        n_group=keys.integer("n_group", default=1),
        topk_group=keys.integer("topk_group", default=1),
        norm_topk=keys.boolean("norm_topk_prob", default=True),
        scaling=keys.number("routed_scaling_factor", default=1.0),
    )
