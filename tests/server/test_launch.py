"""Configuration files and flags: what they resolve to, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.paths import EXAMPLES
from trtllm_replayssm import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig, NGramDecodingConfig, ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ConfigError, ReplaySSMError, UnsupportedError
from trtllm_replayssm.runtime.options import resolve_replay
from trtllm_replayssm.runtime.server.launch import merge, read_yaml, resolve
from trtllm_replayssm.runtime.server.limits import Limits
from trtllm_replayssm.runtime.server.settings import ServerSettings
from trtllm_replayssm.weights.presets import preset_geometry, preset_names

FILES = sorted((EXAMPLES / "serve").glob("*.yaml"))


def test_every_preset_has_an_example() -> None:
    assert {file.stem for file in FILES} == set(preset_names())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_resolves_to_settings_that_fit_its_model(file: Path) -> None:
    geometry, launch = preset_geometry(file.stem), resolve(read_yaml(file))
    options = launch.options
    speculative = options["speculative_config"]
    assert options["device"] == "cuda"
    assert isinstance(speculative, MTPDecodingConfig if geometry.mtp_pattern else NGramDecodingConfig)
    replay = resolve_replay(
        options["replay_config"], options["kv_cache_config"], speculative.draft_len, geometry.state_dtype
    )
    assert replay.max_step_tokens == 1 + speculative.draft_len <= replay.window
    assert options["max_num_tokens"] >= options["max_batch_size"] * replay.max_step_tokens
    assert options["max_seq_len"] <= geometry.max_positions
    assert launch.limits.max_queue_size > options["max_batch_size"]


def test_an_empty_file_leaves_everything_to_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    launch = resolve(read_yaml(tmp_path / "empty.yaml"))
    assert launch.options == {} and launch.limits == Limits()


def test_every_key_arrives_where_it_acts() -> None:
    launch = resolve(
        {
            "max_batch_size": 3, "max_num_tokens": 99, "max_seq_len": 77, "dtype": "float32", "tokenizer": "/x",
            "backend": "pytorch", "tp_size": 2, "kv_cache_config": {"max_tokens": 400},
            "replayssm": {
                "window": 8, "recurrence": "fp8", "rounding": "nearest", "read": "nvfp4", "state_cache": "conventional",
                "prefill_chunk": 5, "device": "cuda:1", "seed": 9, "drafter": "ngram", "draft_len": 4,
                "device_loop": False, "kernel_cache": "/k", "rank_timeout": 60,
                "max_matching_ngram_size": 2, "limits": {"max_n": 2, "drain_seconds": 1.5},
            },
        }
    )  # fmt: skip
    assert launch.options == {
        "max_batch_size": 3, "max_num_tokens": 99, "max_seq_len": 77, "dtype": "float32", "tokenizer": "/x",
        "kv_cache_config": KvCacheConfig(max_tokens=400), "state_cache": "conventional", "prefill_chunk": 5,
        "device": "cuda:1", "seed": 9, "device_loop": False, "kernel_cache": "/k", "tensor_parallel_size": 2,
        "rank_timeout": 60,
        "speculative_config": NGramDecodingConfig(max_draft_len=4, max_matching_ngram_size=2),
        "replay_config": ReplayConfig(
            window=8, recurrence=StateFormat.FP8, recurrence_rounding=Rounding.NEAREST, read=StateFormat.NVFP4
        ),
    }  # fmt: skip
    assert launch.limits == Limits(max_n=2, drain_seconds=1.5)
    mtp = resolve({"replayssm": {"drafter": "mtp", "draft_len": 2, "sample_drafts": True}}).options
    assert mtp["speculative_config"] == MTPDecodingConfig(max_draft_len=2, sample_drafts=True)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"guided_decoding_backend": "llguidance"}, "guided_decoding_backend"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size"), ({"max_beam_width": 2}, "max_beam_width"),
        ({"tp_size": 2, "tensor_parallel_size": 4}, "tp_size and tensor_parallel_size"),
        ({"cuda_graph_config": {"max_batch_size": 0}}, "max_batch_size"),
        ({"cuda_graph_config": {"batch_sizes": [1, "2"]}}, "batch_sizes"),
        ({"cuda_graph_config": {"batch_sizes": 4}}, "CudaGraphConfig"),
        ({"cuda_graph_config": {"batch_sizes": [1, 2], "max_batch_size": 4}}, "max_batch_size"),
        ({"cuda_graph_config": {"mode": "piecewise"}}, "mode"), ({"cuda_graph_config": True}, "cuda_graph_config"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill"), ({"backend": "tensorrt"}, "backend"),
        ({"moe_config": {}}, "moe_config"), ({"kv_cache_config": {"dtype": "fp8"}}, "dtype"),
        ({"kv_cache_config": {"max_tokens": "many"}}, "KvCacheConfig"), ({"kv_cache_config": 3}, "kv_cache_config"),
        ({"speculative_config": {"decoding_type": "Eagle"}}, "decoding_type"),
        ({"speculative_config": {"decoding_type": "MTP", "x": 1}}, "x"),
        ({"speculative_config": {"decoding_type": "NGram"}}, "speculative_config.max_draft_len"),
        ({"speculative_config": {"decoding_type": "MTP"}, "replayssm": {"drafter": "mtp"}}, "replayssm.drafter"),
        ({"replayssm": {"windows": 8}}, "windows"), ({"replayssm": {"window": "8"}}, "replayssm.window"),
        ({"replayssm": {"window": True}}, "replayssm.window"), ({"replayssm": {"window": 999}}, "window"),
        ({"replayssm": {"recurrence": "int8"}}, "replayssm.recurrence"),
        ({"replayssm": {"drafter": "eagle"}}, "replayssm.drafter"),
        ({"replayssm": {"draft_len": 3}}, "replayssm.drafter"), ({"replayssm": {"limits": {"max_x": 1}}}, "max_x"),
        ({"replayssm": {"limits": {"max_n": 0}}}, "max_n"), ({"max_batch_size": "8"}, "max_batch_size"),
    ],
)  # fmt: skip
def test_what_does_not_act_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ReplaySSMError, match=named.replace(".", r"\.")) as caught:
        resolve(values)
    assert isinstance(caught.value, (ConfigError, UnsupportedError))


def test_recorded_batch_sizes_are_those_of_the_file_and_null_means_none() -> None:
    assert "cuda_graph_config" not in resolve({}).options
    assert resolve({"cuda_graph_config": None}).options["cuda_graph_config"] is None
    for section in ({}, {"batch_sizes": [8, 1, 4]}, {"max_batch_size": 9, "enable_padding": False}):
        assert resolve({"cuda_graph_config": section}).options["cuda_graph_config"] == CudaGraphConfig(**section)


def test_the_state_format_of_the_cache_settings_goes_together_with_our_own() -> None:
    cache = {"mamba_ssm_cache_dtype": "float16", "mamba_ssm_stochastic_rounding": False, "max_tokens": 9}
    options = resolve({"kv_cache_config": cache, "replayssm": {"window": 8, "read": "fp8"}}).options
    assert options["kv_cache_config"].max_tokens == 9
    replay = resolve_replay(options["replay_config"], options["kv_cache_config"], 3, "float32")
    assert replay == ReplayConfig(
        window=8, max_step_tokens=4, recurrence=StateFormat.FLOAT16, recurrence_rounding=Rounding.NEAREST,
        read=StateFormat.FP8,
    )  # fmt: skip
    both = resolve({"kv_cache_config": cache, "replayssm": {"recurrence": "fp8"}}).options
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype"):
        resolve_replay(both["replay_config"], both["kv_cache_config"], 3, "float32")


def test_a_flag_and_the_file_must_not_disagree() -> None:
    file = {"max_batch_size": 8, "kv_cache_config": {"max_tokens": 100}}
    cache = {"free_gpu_memory_fraction": 0.5}
    merged = merge(file, {"max_batch_size": 8, "max_seq_len": 64, "dtype": None, "kv_cache_config": cache})
    assert merged == {
        "max_batch_size": 8, "max_seq_len": 64,
        "kv_cache_config": {"max_tokens": 100, "free_gpu_memory_fraction": 0.5},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="max_batch_size"):
        merge(file, {"max_batch_size": 4})


TWICE = ("max_batch_size: 1\nmax_batch_size: 2", "replayssm: {window: 8}\nreplayssm: {}", "a: {b: 1, 'b': 1}")


@pytest.mark.parametrize("text", TWICE)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "twice.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"twice\.yaml.*twice"):
        read_yaml(tmp_path / "twice.yaml")


def test_an_anchor_may_be_merged(tmp_path: Path) -> None:
    (tmp_path / "anchor.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, x: 2}")
    assert read_yaml(tmp_path / "anchor.yaml") == {"a": {"x": 1}, "b": {"x": 2}}


@pytest.mark.parametrize("text", ["- 1", "3: x", "a: [", "\x00", "a: " + "[" * 5000])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_yaml(tmp_path / "bad.yaml")


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: !!python/object/apply:os.getcwd []")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_yaml(tmp_path / "bad.yaml")


@pytest.mark.parametrize(("name", "value"), [("port", 70000), ("model_name", ""), ("api_key", ""), ("api_key", "é")])
def test_settings_of_the_server_are_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**{"model_name": "m", name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [["float16"], {"a": 1}, 16, True])
def test_a_format_that_is_no_word_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"replayssm\.recurrence"):
        resolve({"replayssm": {"recurrence": value}})


@pytest.mark.parametrize(
    ("name", "why"),
    [("max_beam_width", "no beam search"), ("ep_size", "tp_size shares experts too"),
     ("pp_size", "layers are not dealt out"), ("pipeline_parallel_size", "layers are not dealt out")],
)  # fmt: skip
def test_a_setting_that_knows_one_value_says_why(name: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"serve: {name}: expected 1 \({why}.*got 4"):
        resolve({name: 4})


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_one_device_is_the_number_one(value: object) -> None:
    with pytest.raises(UnsupportedError, match="pp_size"):
        resolve({"pp_size": value})
    with pytest.raises(ConfigError, match="tp_size"):
        resolve({"tp_size": value})


def test_a_date_that_does_not_exist_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: 2024-13-45\n")
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read_yaml(tmp_path / "c.yaml")
