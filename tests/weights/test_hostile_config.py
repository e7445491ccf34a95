"""JSON that no exporter writes: one error of ours that names the key or the file, whatever the value."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.weights.small_models import NEMOTRON, QWEN, QWEN_MOE, random_tensors, write
from trtllm_replayssm.errors import CheckpointError, ConfigError
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.hf_config import parse_config
from trtllm_replayssm.weights.quant_config import read_quant_config
from trtllm_replayssm.weights.shards import INDEX, open_shards

HUGE = 10**400  # an integer of JSON that no float holds
DEEP = 50_000  # beyond the recursion limit of every interpreter
FLOAT32_OVERFLOW = 1e39
MTP = {"num_nextn_predict_layers": 1, "n_routed_experts": 4}
VALUES: list[tuple[dict[str, Any], str, Any]] = [
    *((NEMOTRON, key, value) for value in (HUGE, FLOAT32_OVERFLOW, 1e308)
      for key in ("layer_norm_epsilon", "routed_scaling_factor")),
    *((QWEN, "rms_norm_eps", value) for value in (HUGE, FLOAT32_OVERFLOW, 1e-320)),
    *((QWEN, key, value) for value in (HUGE, 10**30, 10**9) for key in ("mtp_num_hidden_layers",)),
    *((base, "head_dim", value) for value in (HUGE, 2**40) for base in (NEMOTRON, QWEN)),
    *((base, "num_hidden_layers", value) for value in (HUGE, 10**9) for base in (NEMOTRON, QWEN)),
    *((NEMOTRON, "n_routed_experts", value) for value in (HUGE, 10**9)),
    (QWEN_MOE, "num_experts", 10**9),
    (NEMOTRON, "hidden_size", HUGE),
    (NEMOTRON, "hybrid_override_pattern", "M" * 5000),
    (QWEN, "layer_types", ["linear_attention"] * 5000),
    (QWEN, "eos_token_id", HUGE),
    (QWEN, "model_type", "x" * 100_000),
    ({**NEMOTRON, **MTP}, "mtp_hybrid_override_pattern", "*" * 5000),
]  # fmt: skip


@pytest.mark.parametrize(("base", "key", "value"), VALUES, ids=[f"{i}-{key}" for i, (_, key, _) in enumerate(VALUES)])
def test_an_enormous_value_is_refused_at_once_by_its_key(base: dict[str, Any], key: str, value: Any) -> None:
    started = time.thread_time()  # other processes' work is not counted
    with pytest.raises(ConfigError, match=key) as caught:
        parse_config({**base, key: value})
    assert time.thread_time() - started < 1 and len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", [HUGE, 1e308, FLOAT32_OVERFLOW, 1.5])
def test_an_enormous_rotary_setting_is_refused_by_its_key(value: Any) -> None:
    for key in ("partial_rotary_factor", "rope_theta"):
        if (key, value) != ("rope_theta", 1.5):
            with pytest.raises(ConfigError, match=key):
                parse_config({**QWEN, "rope_parameters": {**QWEN["rope_parameters"], key: value}})  # type: ignore[dict-item]


def test_layers_by_interval_are_counted_before_they_are_built() -> None:
    config = {**QWEN, "layer_types": None, "full_attention_interval": 4}
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        parse_config({**config, "num_hidden_layers": 10**9})
    assert len(parse_config({**config, "num_hidden_layers": 4096}).layers) == 4096


DOCUMENTS = [
    *('{"a": {"__float__": ' + value + "}}" for value in ("null", "[1]", "{}", '"x"', "1" + "0" * 400)),
    "[" * DEEP + "]" * DEEP,
    '{"a": ' * DEEP + "1" + "}" * DEEP,
    '{"a": ' * 500 + "1" + "}" * 500,  # read by the parser, beyond what printing or comparing it stands
    '{"a": ' + "1" * 5000 + "}",
]


@pytest.mark.parametrize("text", DOCUMENTS, ids=range(len(DOCUMENTS)))
def test_a_document_that_cannot_be_read_is_named_by_its_file(tmp_path: Path, text: str) -> None:
    for file in ("config.json", "generation_config.json"):
        (tmp_path / "config.json").write_text(json.dumps(QWEN))
        (tmp_path / file).write_text(text)
        with pytest.raises(ConfigError, match=file):
            parse_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json"):
        read_quant_config(tmp_path, {})
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_shards(tmp_path)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "", ".", "..", "sub/x.safetensors", "/etc/passwd"])
def test_an_index_that_names_no_possible_file_is_a_checkpoint_error(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path, QWEN, random_tensors(QWEN))
    (directory / "model.safetensors").unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert len(str(caught.value)) < 1000
