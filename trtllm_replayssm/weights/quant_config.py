"""What a checkpoint says about its quantisation: hf_quant_config.json and config.json's `quantization_config`.

The format of a matrix is decided by the tensors present, never here; this file exists so that an algorithm nobody
implemented is refused and never read as something else. Names are those of NVIDIA ModelOpt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.weights.config_reader import load_json, shown
from trtllm_replayssm.weights.matrix import MatrixFormat

MIXED = "MIXED_PRECISION"
_ALGORITHMS = {
    "NVFP4": MatrixFormat.NVFP4,
    "W4A16_NVFP4": MatrixFormat.NVFP4,
    "W4A8_NVFP4_FP8": MatrixFormat.NVFP4,
    "FP8": MatrixFormat.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": MatrixFormat.FP8,
}
_KV_ALGORITHMS = ("FP8", "NONE")  # of the key-value cache; its scales are optional
_UNQUANTISED = (None, "NONE")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """algorithm: of the whole model, or MIXED_PRECISION; layers: module name -> its algorithm (mixed precision);
    excluded: glob patterns of modules left alone; kv_cache: algorithm of the key-value cache, None when unquantised.
    """

    algorithm: str
    layers: Mapping[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    kv_cache: str | None = None

    def format_of(self, module: str) -> MatrixFormat | None:
        """The format that mixed precision names for `module` (name in the files); None when it names none."""
        algorithm = self.layers.get(module)
        return None if algorithm is None else _ALGORITHMS[algorithm]


def read_quant_config(directory: Path, config: Mapping[str, Any]) -> tuple[QuantConfig | None, list[str]]:
    """The settings of both files, None when neither has any, and notes on what they disagree about.

    A copy that names layers one by one wins over one that is shortened to a single algorithm.
    """
    parsed: dict[str, QuantConfig] = {}
    text = config.get("text_config")
    for keys in (config, text if isinstance(text, Mapping) else {}):
        if keys.get("quantization_config") is not None:
            _parse_into(parsed, "config.json quantization_config", keys["quantization_config"])
    path = directory / "hf_quant_config.json"
    if path.exists():
        _parse_into(parsed, path.name, load_json(path))
    if not parsed:
        return None, []
    ranked = sorted(parsed.items(), key=lambda item: len(item[1].layers), reverse=True)
    source, best = ranked[0]
    notes = [
        f"{other} says {quant.algorithm}, {source} says {best.algorithm}: the tensors decide"
        for other, quant in ranked[1:]
        if quant.algorithm != best.algorithm
    ]
    return best, notes


def _parse_into(parsed: dict[str, QuantConfig], source: str, content: Any) -> None:
    if (quant := parse_quant_config(content, source)) is not None:
        parsed[source] = quant


def parse_quant_config(content: Any, source: str) -> QuantConfig | None:
    """One file's settings, flat or under the key `quantization`; None when they say that nothing is quantised."""
    if not isinstance(content, Mapping):
        raise _error(source, "an object", type(content).__name__)
    keys = content.get("quantization", content)
    if not isinstance(keys, Mapping):
        raise _error(source, "an object under `quantization`", type(keys).__name__)
    method = keys.get("quant_method", "modelopt")
    if not (isinstance(method, str) and method.startswith("modelopt")):
        raise _error(f"{source}: quant_method", "modelopt", shown(method), "Export the model with NVIDIA ModelOpt")
    if "quant_algo" not in keys:
        raise _error(f"{source}: quant_algo", f"one of {sorted((*_ALGORITHMS, MIXED))}", "no such key")
    algorithm = keys["quant_algo"]
    kv_cache = _kv_cache(keys, source)
    if algorithm in _UNQUANTISED:
        return None
    layers: dict[str, str] = {}
    if algorithm == MIXED:
        layers = _mixed_layers(keys, source)
    else:
        _check_algorithm(algorithm, f"{source}: quant_algo", (*_ALGORITHMS, MIXED))
    _check_group_size(keys, source)
    excluded = keys.get("exclude_modules", keys.get("ignore")) or []
    if not isinstance(excluded, list) or not all(isinstance(pattern, str) for pattern in excluded):
        raise _error(f"{source}: exclude_modules / ignore", "a list of patterns", shown(excluded))
    return QuantConfig(algorithm=algorithm, layers=layers, excluded=tuple(excluded), kv_cache=kv_cache)


def _mixed_layers(keys: Mapping[str, Any], source: str) -> dict[str, str]:
    entries = keys.get("quantized_layers")
    if not isinstance(entries, Mapping):
        raise _error(f"{source}: quantized_layers", "a map from module to its algorithm", type(entries).__name__)
    layers: dict[str, str] = {}
    for module, entry in entries.items():
        algorithm = entry.get("quant_algo") if isinstance(entry, Mapping) else entry
        _check_algorithm(algorithm, f"{source}: quantized_layers[{module}]", tuple(_ALGORITHMS))
        _check_group_size(entry if isinstance(entry, Mapping) else {}, f"{source}: quantized_layers[{module}]")
        layers[module] = str(algorithm)
    return layers


def _check_algorithm(algorithm: Any, argument: str, known: tuple[str, ...]) -> None:
    if algorithm not in known:
        raise _error(argument, f"one of {sorted(known)}", shown(algorithm), "This build cannot read such weights")


def _check_group_size(keys: Mapping[str, Any], source: str) -> None:
    algorithm, size = keys.get("quant_algo"), keys.get("group_size")
    if _ALGORITHMS.get(str(algorithm)) is MatrixFormat.NVFP4 and size not in (None, 16):
        raise _error(f"{source}: group_size", "16, the block of NVFP4", shown(size))


def _kv_cache(keys: Mapping[str, Any], source: str) -> str | None:
    value = keys.get("kv_cache_quant_algo")
    scheme = keys.get("kv_cache_scheme")
    if value is None and isinstance(scheme, str):
        value = scheme
    elif value is None and isinstance(scheme, Mapping):
        value = "FP8" if (scheme.get("num_bits"), scheme.get("type")) == (8, "float") else shown(dict(scheme))
    if value is None or value == "NONE":
        return None
    _check_algorithm(value, f"{source}: kv_cache_quant_algo", _KV_ALGORITHMS)
    return str(value)


def _error(argument: str, expected: object, got: object, hint: str | None = None) -> ConfigError:
    return ConfigError("read_quant_config", argument, expected=expected, got=got, hint=hint)
