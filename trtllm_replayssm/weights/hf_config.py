"""config.json of a public checkpoint -> ModelGeometry: dispatch on `model_type`, and the keys all families share.

The keys are those of the transformers configurations `nemotron_h`, `qwen3_5` and `qwen3_5_moe`. Keys that cannot
change a value (scheduling hints, initialisation, vision) are ignored; keys that would are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.config_reader import ConfigReader, load_json, shown
from trtllm_replayssm.weights.nemotron_config import nemotron_geometry
from trtllm_replayssm.weights.qwen_config import qwen_geometry

_LOG = logging.getLogger(__name__)

_TEXT_TYPE = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}  # wrapper type -> type of text_config
_PARSERS: Mapping[str, Callable[..., ModelGeometry]] = {
    "nemotron_h": nemotron_geometry,
    "qwen3_5": qwen_geometry,
    "qwen3_5_text": qwen_geometry,
    "qwen3_5_moe": qwen_geometry,
    "qwen3_5_moe_text": qwen_geometry,
}


def parse_config(source: str | Path | Mapping[str, Any], *, name: str | None = None) -> ModelGeometry:
    """The geometry of `source`: a config.json, a directory that holds one, or its content.

    generation_config.json beside the file adds end-of-sequence tokens (its own come first). name: what to call the
    model; the directory's name by default. Raises ConfigError that names the key.
    """
    generation: Mapping[str, Any] = {}
    if isinstance(source, Mapping):
        config = source
        name = name or str(config.get("_name_or_path") or config.get("model_type") or "model")
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        config = load_json(path)
        name = name or path.absolute().parent.name  # not resolved: download caches link files to other folders
        beside = path.with_name("generation_config.json")
        generation = load_json(beside) if beside.exists() else {}

    outer = ConfigReader(config)
    model_type = outer.string("model_type")
    if model_type not in _PARSERS:
        raise outer.error(
            "model_type", f"one of {sorted(_PARSERS)}", shown(model_type), "This architecture is unknown here"
        )
    inner = _text_keys(outer, model_type)
    tied = _tied(outer, inner)
    state_dtype = inner.string("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default=None)
    vocab = inner.integer("vocab_size")
    geometry = _PARSERS[model_type](
        inner,
        name=name,
        tie_embeddings=tied,
        state_dtype=_state_dtype(inner, state_dtype),
        eos_ids=_eos_ids(outer, inner, ConfigReader(generation), vocab),
        bos_id=_token_id("bos_token_id", outer, inner, ConfigReader(generation), vocab),
        pad_id=_token_id("pad_token_id", outer, inner, ConfigReader(generation), vocab),
    )
    _LOG.info(
        "%s: config.json asks for a recurrent state in %s", name,
        geometry.state_dtype if state_dtype else f"no type; the default is {geometry.state_dtype}",
    )  # fmt: skip
    return geometry


def _text_keys(outer: ConfigReader, model_type: str) -> ConfigReader:
    """The keys of the language model: those of `text_config` in a multimodal wrapper, else all."""
    text = outer.raw("text_config", default=None)
    if text is None:
        return outer
    if not isinstance(text, Mapping) or model_type not in _TEXT_TYPE:
        wrappers = " or ".join(sorted(_TEXT_TYPE))
        raise outer.error(
            "text_config", f"an object in a config of model_type {wrappers}", f"{type(text).__name__} in {model_type}"
        )
    inner = ConfigReader({"model_type": _TEXT_TYPE[model_type], **text})
    inner.only("model_type", allowed=(_TEXT_TYPE[model_type], model_type))
    return inner


def _tied(outer: ConfigReader, inner: ConfigReader) -> bool:
    """tie_word_embeddings, which may sit at the top level, in text_config or in both; untied when absent."""
    values = {reader.boolean("tie_word_embeddings", default=None) for reader in (outer, inner)} - {None}
    if len(values) > 1:
        raise outer.error("tie_word_embeddings", "one value", "true and false, at the top level and in text_config")
    return bool(values and values.pop())


def _state_dtype(inner: ConfigReader, value: str | None) -> str:
    if value is None:
        return "float32"
    if value not in ("float32", "float16", "bfloat16"):
        raise inner.error("mamba_ssm_cache_dtype / mamba_ssm_dtype", "float32, float16 or bfloat16", shown(value))
    return value


def _eos_ids(outer: ConfigReader, inner: ConfigReader, generation: ConfigReader, vocab: int) -> tuple[int, ...]:
    own = inner.token_ids("eos_token_id", vocab) or outer.token_ids("eos_token_id", vocab)
    return tuple(dict.fromkeys(generation.token_ids("eos_token_id", vocab) + own))


def _token_id(key: str, outer: ConfigReader, inner: ConfigReader, generation: ConfigReader, vocab: int) -> int | None:
    for reader in (inner, outer, generation):
        if (token := reader.token_id(key, vocab)) is not None:
            return token
    return None
