"""What must hold of every build record: types by name, no copy of a cache, bounded scratch. No test here."""

from __future__ import annotations

import math
from collections.abc import Iterable

from trtllm_replayssm.bindings import ALIAS_SUFFIX
from trtllm_replayssm.builders.build_log import EngineRecord, quantised_layers
from trtllm_replayssm.builders.parameters import Parameters, matrix_formats, parameter_specs
from trtllm_replayssm.manifest import Manifest
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.weights.matrix import MatrixFormat

MIB = 1 << 20
# Scratch of one engine and profile. Accepts a GEMM workspace and, per token, the mask of its row (2 bytes a position,
# twice) and the activations of one layer; rejects a copy of a layer's cache, let alone one per query head.
FIXED_SCRATCH = 40 * MIB
ACTIVATIONS_PER_TOKEN = 96 * 1024


def assert_quantised_matmuls(manifest: Manifest, records: Iterable[EngineRecord], parameters: Parameters) -> None:
    """In every profile exactly the dense matrices stored as NVFP4 or FP8 run as such, by name."""
    specs = parameter_specs(parameters.geometry)
    expected = {
        name.removesuffix(".weight"): fmt
        for name, fmt in matrix_formats(parameters).items()
        if fmt in (MatrixFormat.NVFP4, MatrixFormat.FP8) and specs[name].role is not ParamRole.EXPERTS
    }
    assert {k: v for record in records for k, v in record.quantised.items()} == expected
    for number, profile in enumerate(manifest.profiles):
        running = {k: v for record in records for k, v in quantised_layers(record, number).items()}
        assert running == expected, profile


def assert_all_matmuls_named(records: Iterable[EngineRecord], parameters: Parameters) -> None:
    """Every dense matrix is some compiled layer, so that the rule above cannot pass by seeing nothing."""
    specs = parameter_specs(parameters.geometry)
    seen = {module for record in records for layer in record.layers for module in layer.modules}
    wanted = {n.removesuffix(".weight") for n, s in specs.items() if s.role in (ParamRole.LINEAR, ParamRole.ROUTER)}
    assert wanted <= seen, sorted(wanted - seen)


def assert_no_cache_copies(manifest: Manifest, records: Iterable[EngineRecord]) -> None:
    """No compiled layer writes a tensor of the size of a cache but the cache itself."""
    depth = manifest.build.max_seq_len + manifest.replay.max_step_tokens
    head_dim = manifest.geometry.attention.head_dim
    caches = 0
    for record in records:
        for layer in record.layers:
            for output in layer.outputs:
                if depth in output.dims and head_dim in output.dims:
                    name = output.name.partition(" [profile")[0]
                    assert name.endswith((f"keys{ALIAS_SUFFIX}", f"values{ALIAS_SUFFIX}")), (record.label, output)
                    caches += 1
    assert caches >= 2 * len(manifest.profiles) * len(manifest.geometry.kv_layers)


def assert_scratch_bound(manifest: Manifest, records: Iterable[EngineRecord]) -> None:
    """Scratch of every engine in every profile below the stated bound."""
    depth = manifest.build.max_seq_len + manifest.replay.max_step_tokens
    for record in records:
        assert len(record.scratch_bytes) == len(manifest.profiles)
        for (name, profile), size in zip(manifest.profiles.items(), record.scratch_bytes, strict=True):
            tokens = profile.rows[2] * profile.tokens[2]
            bound = FIXED_SCRATCH + tokens * (4 * depth + ACTIVATIONS_PER_TOKEN)
            assert size <= bound, (record.label, name, size / MIB, bound / MIB)


def cache_bytes(manifest: Manifest, rows: int, itemsize: int) -> int:
    """Keys of one layer for `rows` rows: what a copy would cost."""
    attention = manifest.geometry.attention
    depth = manifest.build.max_seq_len + manifest.replay.max_step_tokens
    return math.prod((rows, attention.kv_heads, depth, attention.head_dim, itemsize))
