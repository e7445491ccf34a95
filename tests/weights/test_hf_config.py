"""config.json -> geometry: every spelling that public files use, and an error that names the key for the rest."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.weights.small_models import NEMOTRON, QWEN, QWEN_MOE
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.shapes import LayerKind, Router, SsmKind
from trtllm_replayssm.weights.hf_config import parse_config

M, A, D, E = LayerKind.SSM, LayerKind.ATTENTION, LayerKind.MLP, LayerKind.MOE


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_nemotron_keys_reach_the_geometry() -> None:
    g = parse_config({**NEMOTRON, "n_group": 2, "topk_group": 1})
    assert g.layers == (M, D, A, E) and g.ssm.kind is SsmKind.MAMBA2
    assert (g.ssm.heads, g.ssm.groups, g.ssm.head_dim, g.ssm.state_dim, g.ssm.conv_bias) == (4, 2, 8, 16, True)
    assert (g.attention.heads, g.attention.kv_heads, g.attention.head_dim, g.attention.rotary_dim) == (4, 2, 16, 0)
    assert g.moe is not None and (g.moe.latent, g.moe.scaling, g.moe.router) == (16, 2.5, Router.SIGMOID_BIAS)
    assert (g.moe.n_group, g.moe.topk_group, g.moe.norm_topk, g.moe.gated) == (2, 1, True, False)
    assert (g.bos_id, g.eos_ids, g.pad_id, g.tie_embeddings, g.mtp_pattern) == (1, (2,), 0, False, ())


def test_qwen_keys_reach_the_geometry() -> None:
    g = parse_config(QWEN)
    assert g.layers == (M, A) and g.ssm.kind is SsmKind.GDN and g.moe is None and g.mlp_intermediate == 64
    assert (g.ssm.heads, g.ssm.groups, g.ssm.conv_bias) == (4, 2, False)
    assert (g.attention.rotary_dim, g.attention.rope_theta) == (4, 1e7)
    assert (g.bos_id, g.eos_ids, g.pad_id, g.mtp_pattern) == (None, (3,), None, (A,))
    moe = parse_config(QWEN_MOE).moe
    assert moe is not None and (moe.experts, moe.latent, moe.gated, moe.shared_gated) == (4, None, True, True)
    assert moe.router is Router.SOFTMAX and moe.norm_topk


def test_head_dim_is_read_and_not_computed() -> None:
    for config in (NEMOTRON, QWEN):
        assert parse_config({**config, "head_dim": 24, "hidden_size": 48}).attention.head_dim == 24
        with pytest.raises(ConfigError, match="head_dim"):
            parse_config(without(config, "head_dim"))


@pytest.mark.parametrize(
    "spelling",
    [
        {"layers_block_type": ["mamba", "mlp", "attention", "moe"]},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
        {"layer_types": ["linear_attention", "mlp", "full_attention", "moe"]},
        {"hybrid_override_pattern": "M-*E", "layers_block_type": ["mamba", "mlp", "attention", "moe"]},
    ],
)
def test_nemotron_layers_in_every_spelling(spelling: dict[str, Any]) -> None:
    base = without(NEMOTRON, "hybrid_override_pattern", "num_hidden_layers")
    assert parse_config({**base, **spelling}).layers == (M, D, A, E)


def test_nemotron_older_key_names() -> None:
    old = {
        "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit", "attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon",
        "num_local_experts": "n_routed_experts",
    }  # fmt: skip
    renamed = {**without(NEMOTRON, *old.values()), **{name: NEMOTRON[new] for name, new in old.items()}}
    assert parse_config(renamed) == parse_config(NEMOTRON)


def test_qwen_layers_from_the_interval() -> None:
    config = {**without(QWEN, "layer_types"), "num_hidden_layers": 8, "full_attention_interval": 4}
    assert parse_config(config).layers == (M, M, M, A) * 2


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, None, True), (None, True, True), (None, None, False),
                                                      (True, True, True), (False, None, False)])  # fmt: skip
def test_wrapper_with_text_config(outer: bool | None, inner: bool | None, tied: bool) -> None:
    wrapper: dict[str, Any] = {
        "model_type": "qwen3_5",
        "text_config": without(QWEN, "tie_word_embeddings", "model_type"),
    }
    if outer is not None:
        wrapper["tie_word_embeddings"] = outer
    if inner is not None:
        wrapper["text_config"]["tie_word_embeddings"] = inner
    assert parse_config(wrapper).tie_embeddings is tied
    assert parse_config(wrapper).layers == (M, A)


def test_contradicting_ties_are_an_error() -> None:
    wrapper = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": QWEN}
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        parse_config(wrapper)


def test_a_moe_wrapper_needs_experts() -> None:
    assert parse_config({"model_type": "qwen3_5_moe", "text_config": QWEN_MOE}).moe is not None
    with pytest.raises(ConfigError, match="num_experts"):
        parse_config({"model_type": "qwen3_5_moe", "text_config": without(QWEN, "model_type")})
    with pytest.raises(ConfigError, match="model_type"):
        parse_config({"model_type": "qwen3_5_moe", "text_config": QWEN})


@pytest.mark.parametrize("text", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinity_as_files_spell_it(tmp_path: Path, text: str) -> None:
    content = json.dumps(without(NEMOTRON, "time_step_limit"))[:-1] + f', "time_step_limit": [0.0, {text}]}}'
    (tmp_path / "config.json").write_text(content)
    assert parse_config(tmp_path).layers == parse_config(tmp_path / "config.json").layers == (M, D, A, E)


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [(2, [2, 11], (2, 11)), ([2, 11], None, (2, 11)), (2, 11, (11, 2)), (None, [7], (7,)), (None, None, ())],
)
def test_eos_ids_of_both_files_are_merged(tmp_path: Path, own: Any, generation: Any, expected: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**NEMOTRON, "eos_token_id": own}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    geometry = parse_config(tmp_path)
    assert geometry.eos_ids == expected and geometry.name == tmp_path.name


def test_the_name_is_the_directorys_even_when_files_are_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text(json.dumps(NEMOTRON))
    (tmp_path / "some-model").mkdir()
    (tmp_path / "some-model" / "config.json").symlink_to(tmp_path / "blobs" / "0123")
    assert parse_config(tmp_path / "some-model").name == "some-model"


def test_mtp_keys() -> None:
    mtp = {**NEMOTRON, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    assert parse_config(mtp).mtp_pattern == (A, E)
    listed = {**NEMOTRON, "num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
    assert parse_config(listed).mtp_pattern == (A, E)
    assert parse_config({**mtp, "num_nextn_predict_layers": 0}).mtp_pattern == ()
    assert parse_config(without(QWEN, "mtp_num_hidden_layers")).mtp_pattern == ()


def test_the_mlp_width_is_needed_exactly_where_an_mlp_is() -> None:
    no_mlp = {**without(NEMOTRON, "intermediate_size", "num_hidden_layers"), "hybrid_override_pattern": "M*E"}
    assert (
        parse_config({**no_mlp, "intermediate_size": 64}).mlp_intermediate == parse_config(no_mlp).mlp_intermediate == 0
    )
    only_in_head = {**no_mlp, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*-"}
    assert parse_config({**only_in_head, "intermediate_size": 64}).mlp_intermediate == 64
    with pytest.raises(ConfigError, match="intermediate_size"):
        parse_config(only_in_head)


def test_d01_state_dtype_is_float32_unless_the_config_names_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trtllm_replayssm"):
        assert parse_config(NEMOTRON, name="silent").state_dtype == "float32"
        assert parse_config({**NEMOTRON, "mamba_ssm_cache_dtype": "float16"}, name="explicit").state_dtype == "float16"
        assert parse_config({**QWEN, "mamba_ssm_dtype": "bfloat16"}).state_dtype == "bfloat16"
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "silent: config.json asks for a recurrent state in no type; the default is float32"
    assert messages[1] == "explicit: config.json asks for a recurrent state in float16"


NEMOTRON_ERRORS = [
    ({"model_type": "llama"}, "model_type"),
    ({"hidden_size": None}, "hidden_size.*no such key"),
    ({"hidden_size": "32"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"num_hidden_layers": 5}, "num_hidden_layers"),
    ({"hybrid_override_pattern": "M-*X"}, "hybrid_override_pattern.*'X'"),
    ({"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
    ({"layers_block_type": ["mamba", "mamba", "attention", "moe"]}, "layers_block_type"),
    ({"layers_block_type": ["mamba", 1]}, "layers_block_type"),
    ({"use_bias": True}, "use_bias"),
    ({"mamba_proj_bias": True}, "mamba_proj_bias"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"attention_bias": True}, "attention_bias"),
    ({"attention_bias": 0}, "attention_bias"),
    ({"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
    ({"time_step_limit": 1}, "time_step_limit"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ({"residual_in_fp32": True}, "residual_in_fp32"),
    ({"n_shared_experts": 2}, "n_shared_experts"),
    ({"num_experts_per_tok": 5}, "top_k"),
    ({"n_group": 3}, "n_group"),
    ({"mamba_n_groups": 4}, "mamba_n_groups"),
    ({"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype"),
    ({"eos_token_id": 48}, "eos_token_id"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id"),
    ({"bos_token_id": [1, 2]}, "bos_token_id"),
    ({"num_nextn_predict_layers": 1}, "mtp_hybrid_override_pattern"),
    ({"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*"}, "num_nextn_predict_layers"),
    ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "M"}, "mtp_hybrid_override_pattern"),
    ({"text_config": {}}, "text_config"),
]  # fmt: skip
QWEN_ERRORS = [
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}, "rope_type"),
    ({"rope_parameters": {"rope_theta": 1e7}}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.3}}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2.0}}, "partial_rotary_factor"),
    ({"layer_types": ["linear_attention", "moe"]}, "layer_types"),
    ({"num_hidden_layers": 3}, "num_hidden_layers"),
    ({"layer_types": None}, "full_attention_interval"),
    ({"num_key_value_heads": 3}, "kv_heads"),
    ({"linear_num_key_heads": 3}, "heads"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
]  # fmt: skip
MOE_ERRORS = [
    ({"norm_topk_prob": False}, "norm_topk_prob"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ({"mlp_only_layers": [0]}, "mlp_only_layers"),
    ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
]
CASES = [
    *((NEMOTRON, change, key) for change, key in NEMOTRON_ERRORS),
    *((QWEN, change, key) for change, key in QWEN_ERRORS),
    *((QWEN_MOE, change, key) for change, key in MOE_ERRORS),
]


@pytest.mark.parametrize(
    ("base", "change", "message"), CASES, ids=[f"{i}-{key[:24]}" for i, (_, _, key) in enumerate(CASES)]
)
def test_an_impossible_value_is_named(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    parse_config(base)
    with pytest.raises(ConfigError, match=message):
        parse_config({**base, **change})


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        parse_config(tmp_path)
    for content in ("{", "[]", '"text"'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            parse_config(tmp_path)
