"""The two places where a ModelOpt checkpoint says what is quantised: hf_quant_config.json and config.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from trtllm_replayssm._version import __version__
from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.quant_config import MIXED

_ALGORITHM = {MatrixFormat.NVFP4: "NVFP4", MatrixFormat.FP8: "FP8"}
_NVFP4_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": FP4_BLOCK}
_FP8_GROUP = {"dynamic": False, "num_bits": 8, "type": "float"}


def quantisation_keys(
    quantised: dict[str, MatrixFormat], others: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(`quantization_config` of config.json, content of hf_quant_config.json).

    quantised: module -> its new format; others: modules with a weight that keep theirs. NVFP4 alone is written as one
    algorithm with excluded patterns; with FP8 among them every module is named (MIXED_PRECISION).
    """
    producer = {"name": "trtllm-replayssm", "version": __version__}
    formats = set(quantised.values())
    if MatrixFormat.FP8 in formats:
        layers = {name: _layer_entry(kind) for name, kind in sorted(quantised.items())}
        settings: dict[str, Any] = {"quant_algo": MIXED, "quantized_layers": layers}
        groups = {f"group_{i}": _group(kind, quantised) for i, kind in enumerate(sorted(formats))}
        excluded: list[str] = []
    else:
        settings = {"quant_algo": "NVFP4", "group_size": FP4_BLOCK}
        groups = {"group_0": {"weights": _NVFP4_GROUP, "targets": ["Linear"]}}
        excluded = excluded_patterns(sorted(quantised), others)
    in_config = {
        "quant_method": "modelopt",
        **settings,
        "config_groups": groups,
        "ignore": excluded,
        "producer": producer,
    }
    in_file = {
        "producer": producer,
        "quantization": {**settings, "kv_cache_quant_algo": None, "exclude_modules": excluded},
    }
    return in_config, in_file


def _layer_entry(kind: MatrixFormat) -> dict[str, Any]:
    entry: dict[str, Any] = {"quant_algo": _ALGORITHM[kind]}
    return {**entry, "group_size": FP4_BLOCK} if kind is MatrixFormat.NVFP4 else entry


def _group(kind: MatrixFormat, quantised: dict[str, MatrixFormat]) -> dict[str, Any]:
    weights = _NVFP4_GROUP if kind is MatrixFormat.NVFP4 else _FP8_GROUP
    return {"weights": weights, "targets": sorted(name for name, own in quantised.items() if own is kind)}


def excluded_patterns(quantised: Sequence[str], others: Sequence[str]) -> list[str]:
    """Glob patterns that match all of `others` and none of `quantised`; layer numbers become `*` where that holds."""
    patterns: set[str] = set()
    kept_exact: set[str] = set()
    for name in others:
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        if pattern in patterns or pattern in kept_exact:
            continue
        (kept_exact if any(fnmatchcase(q, pattern) for q in quantised) else patterns).add(pattern)
    exact = {name for name in others if re.sub(r"\.\d+\.", ".*.", name) in kept_exact}
    return sorted(patterns | exact)
