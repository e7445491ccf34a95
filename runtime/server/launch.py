"""From a YAML file in TensorRT-LLM's form and command-line flags to what a server is started with.

Only keys that act are known; any other is refused by name. A value that a flag and the file give differently is refused
too: which of the two should win is nothing to guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ConfigError, UnsupportedError
from trtllm_replayssm.runtime.llm import CudaGraphConfig, KvCacheConfig, MTPDecodingConfig, NGramDecodingConfig
from trtllm_replayssm.runtime.options import AUTO, STATE_DTYPES, SpeculativeConfig, config_from_mapping
from trtllm_replayssm.runtime.server.limits import Limits

_PLAIN = ("max_batch_size", "max_num_tokens", "max_seq_len", "dtype", "tokenizer")
_RANKS = ("tp_size", "tensor_parallel_size")
_LAYERS, _EXPERTS = "layers are not dealt out over GPUs; tp_size shares a model", "tp_size shares experts too"
_ONE = {  # settings that know one value, and why
    "pp_size": _LAYERS, "pipeline_parallel_size": _LAYERS, "ep_size": _EXPERTS, "max_beam_width": "no beam search",
}  # fmt: skip
_FIXED = {"enable_chunked_prefill": (True,), "backend": ("torch", "pytorch"), "guided_decoding_backend": ("xgrammar",)}
_SECTIONS = ("kv_cache_config", "speculative_config", "cuda_graph_config", "replayssm")
_REPLAY = {"window": int, "recurrence": StateFormat, "rounding": Rounding, "read": StateFormat}
_ENGINE = {
    "state_cache": str, "prefill_chunk": int, "device": str, "seed": int, "plugin_library": str, "kernel_cache": str,
    "device_loop": bool, "rank_timeout": int,
}  # fmt: skip
_DRAFTER = ("drafter", "draft_len", "max_matching_ngram_size", "sample_drafts")
_INTEGERS = frozenset({"max_batch_size", "max_num_tokens", "max_seq_len"})
_Value = TypeVar("_Value")
_Config = TypeVar("_Config", KvCacheConfig, MTPDecodingConfig, NGramDecodingConfig, CudaGraphConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """options: keyword arguments of `LLM`. limits: of the server."""

    options: Mapping[str, Any]
    limits: Limits


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty for an empty file. Raises ConfigError; needs PyYAML."""
    import yaml

    class Once(yaml.SafeLoader):  # type: ignore[misc]  # the package has no types
        """Refuses a key that stands twice in a mapping, of which the last would win."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """See the base class."""
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = next((name for i, name in enumerate(names) if name in names[:i] and name != "<<"), None)
            if twice is not None:
                raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} twice", node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Once)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no such date, bytes that are no UTF-8
        raise ConfigError("serve", str(path), expected="YAML", got=" ".join(str(error).split())) from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError("serve", str(path), expected="a mapping with string keys", got=type(values).__name__)
    return values


def merge(file: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """File and flags (None: not given), sections one level deep. Raises ConfigError where they disagree."""
    merged = dict(file)
    for name, value in flags.items():
        if value is None:
            continue
        known = merged.get(name)
        if isinstance(value, Mapping):
            section = _mapping(name, known)
            merged[name] = merge(section, value)
        elif known is not None and known != value:
            raise ConfigError("serve", name, expected=f"{known!r}, as in the file", got=f"{value!r} as a flag")
        else:
            merged[name] = value
    return merged


def resolve(values: Mapping[str, Any]) -> Launch:
    """Settings of file and flags -> what they mean. Raises ConfigError and UnsupportedError, naming the key."""
    known = {*_PLAIN, *_RANKS, *_ONE, *_FIXED, *_SECTIONS}
    _refuse_unknown("serve", values, known)
    _refuse_inactive(values)
    ours = _mapping("replayssm", values.get("replayssm"))
    _refuse_unknown("replayssm", ours, {*_REPLAY, *_ENGINE, *_DRAFTER, "limits"})
    options: dict[str, Any] = {}
    for name in _PLAIN:
        if values.get(name) is not None:
            options[name] = _typed(name, values[name], int if name in _INTEGERS else str)
    ranks = {name: _typed(name, values[name], int) for name in _RANKS if values.get(name) is not None}
    if ranks:
        options["tensor_parallel_size"] = _one_of(ranks)
    for name, kind in _ENGINE.items():
        if ours.get(name) is not None:
            options[name] = _typed(f"replayssm.{name}", ours[name], kind)
    cache = KvCacheConfig()
    if values.get("kv_cache_config") is not None:
        cache = options["kv_cache_config"] = _config(
            KvCacheConfig, _mapping("kv_cache_config", values["kv_cache_config"])
        )
    if "cuda_graph_config" in values:  # null means none, as in TensorRT-LLM
        graphs = values["cuda_graph_config"]
        options["cuda_graph_config"] = (
            None if graphs is None else _config(CudaGraphConfig, _mapping("cuda_graph_config", graphs))
        )
    speculative = _speculative(values.get("speculative_config"), ours)
    if speculative is not None:
        options["speculative_config"] = speculative
    replay = _replay(ours, cache)
    if replay is not None:
        options["replay_config"] = replay
        if ours.get("recurrence") is None and "kv_cache_config" in options:
            options["kv_cache_config"] = replace(cache, mamba_ssm_cache_dtype=AUTO)
    return Launch(options=options, limits=_limits(_mapping("replayssm.limits", ours.get("limits"))))


def _one_of(ranks: Mapping[str, int]) -> int:
    """The value of a setting with two names."""
    if len(set(ranks.values())) != 1:
        raise ConfigError("serve", " and ".join(ranks), expected="one value", got=list(ranks.values()))
    return next(iter(ranks.values()))


def _refuse_unknown(where: str, values: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(where, ", ".join(unknown), expected=f"keys among {sorted(known)}", got="an unsupported key")


def _config(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """A settings object of TensorRT-LLM's section; a value of a wrong type is refused like a wrong value."""
    try:
        return config_from_mapping(kind, values)
    except TypeError as error:
        raise ConfigError("serve", kind.__name__, expected="values of the right types", got=str(error)) from error


def _refuse_inactive(values: Mapping[str, Any]) -> None:
    for name, why in _ONE.items():
        value = values.get(name)
        if value is not None and (type(value) is not int or value != 1):
            raise UnsupportedError("serve", name, expected=f"1 ({why})", got=repr(value))
    for name, built in _FIXED.items():
        if values.get(name) is not None and values[name] not in built:
            raise UnsupportedError("serve", name, expected=" or ".join(map(str, built)), got=values[name])


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError("serve", name, expected="a mapping", got=repr(value))
    return value


def _typed(name: str, value: Any, kind: type[_Value]) -> _Value:
    """A value of the wanted type; enumerations by their value."""
    if kind in (StateFormat, Rounding):
        members = {member.value: member for member in kind}  # type: ignore[attr-defined]
        if isinstance(value, str) and value in members:
            return members[value]  # type: ignore[no-any-return]
        raise ConfigError("serve", name, expected=list(members), got=repr(value))
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, kind):
        raise ConfigError("serve", name, expected=kind.__name__, got=repr(value))
    return value


def _replay(ours: Mapping[str, Any], cache: KvCacheConfig) -> ReplayConfig | None:
    """The recurrent state's settings, None when the file leaves them to the model and the cache settings.

    cache: names the format where `replayssm` has settings and no recurrence; what neither names is float32.
    """
    given: dict[str, Any] = {
        name: _typed(f"replayssm.{name}", ours[name], kind)
        for name, kind in _REPLAY.items()
        if ours.get(name) is not None
    }
    if not given:
        return None
    if "rounding" in given:
        given["recurrence_rounding"] = given.pop("rounding")
    format_of_cache = STATE_DTYPES[cache.mamba_ssm_cache_dtype]
    if "recurrence" not in given and format_of_cache is not None:
        given["recurrence"] = format_of_cache
        if not cache.mamba_ssm_stochastic_rounding:
            given.setdefault("recurrence_rounding", Rounding.NEAREST)
    return ReplayConfig(**given)


def _speculative(section: object, ours: Mapping[str, Any]) -> SpeculativeConfig | None:
    """From speculative_config, with TensorRT-LLM's decoding_type, or from replayssm.drafter; not both."""
    named = [name for name in _DRAFTER if ours.get(name) is not None]
    if section is not None:
        if named:
            raise ConfigError("serve", f"replayssm.{named[0]}", expected="no speculative_config beside it", got="both")
        values = dict(_mapping("speculative_config", section))
        kind = values.pop("decoding_type", None)
        if kind == "MTP":
            return _config(MTPDecodingConfig, values)
        if kind == "NGram":
            if values.get("max_draft_len") is None:
                raise ConfigError(
                    "serve", "speculative_config.max_draft_len", expected="drafts per step, at least 1", got="nothing",
                    hint="Write max_draft_len: 3 beside decoding_type: NGram",
                )  # fmt: skip
            return _config(NGramDecodingConfig, values)
        raise ConfigError("serve", "speculative_config.decoding_type", expected="MTP or NGram", got=repr(kind))
    drafter = ours.get("drafter", "none")
    values = {name: ours[name] for name in named if name != "drafter"}
    if "draft_len" in values:
        values["max_draft_len"] = _typed("replayssm.draft_len", values.pop("draft_len"), int)
    if drafter == "mtp":
        return _config(MTPDecodingConfig, values)
    if drafter == "ngram":
        return _config(NGramDecodingConfig, {"max_draft_len": 3, **values})
    if drafter != "none" or values:
        expected = "mtp, ngram, or none without settings of a drafter"
        raise ConfigError("serve", "replayssm.drafter", expected=expected, got=repr(drafter))
    return None


def _limits(values: Mapping[str, Any]) -> Limits:
    _refuse_unknown("replayssm.limits", values, {field.name for field in fields(Limits)})
    return Limits(**values)
