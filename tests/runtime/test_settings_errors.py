"""Typical mistakes with the public API: one clear typed error that names the argument, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.paths import EXAMPLES
from trtllm_replayssm import (
    LLM,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    ReplayConfig,
    SamplingParams,
)
from trtllm_replayssm.errors import CheckpointError, ConfigError, RequestError

QWEN = EXAMPLES / "qwen3_5-tiny-nvfp4"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"speculative_config": "mtp"}, "speculative_config"),
        ({"speculative_config": {"max_draft_len": 3}}, "speculative_config"),
        ({"kv_cache_config": {"max_tokens": 3}}, "kv_cache_config"),
        ({"replay_config": {"window": 16}}, "replay_config"),
        ({"max_batch_size": "8"}, "max_batch_size"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"seed": -1}, "seed"),
        ({"seed": "a"}, "seed"),
        ({"device": "gpu"}, "device"),
        ({"device": "cuda"}, "without one"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(options: dict[str, Any], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=part):
        LLM(QWEN, **options)


@pytest.mark.parametrize(
    ("kind", "values", "part"),
    [
        (ReplayConfig, {"window": "16"}, "window"),
        (ReplayConfig, {"window": True}, "window"),
        (ReplayConfig, {"recurrence": "float16"}, "StateFormat"),
        (ReplayConfig, {"read": "fp8"}, "StateFormat or None"),
        (KvCacheConfig, {"max_tokens": "10"}, "max_tokens"),
        (MTPDecodingConfig, {"max_draft_len": 20}, "1..15"),
        (MTPDecodingConfig, {"num_nextn_predict_layers": 1, "max_draft_len": 2}, "Both mean drafts per step"),
        (NGramDecodingConfig, {"max_draft_len": 0}, "max_draft_len"),
    ],
    ids=str,
)
def test_a_wrong_value_of_a_config_is_named(kind: type, values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        kind(**values)


def test_a_name_of_a_hub_is_told_from_a_folder() -> None:
    with pytest.raises(CheckpointError, match="names of hubs and presets are not looked up"):
        LLM("Qwen/Qwen3.5-4B")
    with pytest.raises(CheckpointError, match="got a file"):
        LLM(QWEN / "config.json")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(QWEN, max_seq_len=64) as llm:
        yield llm


@pytest.mark.parametrize(
    ("inputs", "params", "part"),
    [
        (None, None, "inputs"),
        (5, None, "inputs"),
        ("x", {"max_tokens": 3}, "sampling_params"),
        (["x"], [{"max_tokens": 3}], "sampling_params"),
    ],
    ids=str,
)
def test_a_wrong_call_is_named_and_the_next_one_works(llm: LLM, inputs: Any, params: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        llm.generate(inputs, params)
    assert llm.generate("The", SamplingParams(max_tokens=2)).outputs[0].length == 2


def test_stop_of_another_type_is_named() -> None:
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(stop=5)  # type: ignore[arg-type]
