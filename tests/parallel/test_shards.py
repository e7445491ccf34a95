"""Each rank's shapes and pieces: they fit each other, and together they are the whole model."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.paths import ROOT
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.models import model_of
from trtllm_replayssm.ops.reference.philox import state_words
from trtllm_replayssm.params import Cut, ParamRole, ParamSpec, Span
from trtllm_replayssm.shapes import LayerKind
from trtllm_replayssm.spec import philox
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import Fp8Matrix, Nvfp4Matrix
from trtllm_replayssm.weights.presets import preset_geometry, preset_names
from trtllm_replayssm.weights.shard import CheckpointShard, WeightSource, cut_matrix
from trtllm_replayssm.weights.tensor_parallel import TensorParallel, partial_results, shard_geometry

CHECKPOINTS = sorted(path.parent.name for path in (ROOT / "tests" / "checkpoints").glob("*/config.json"))


def opened(name: str) -> Checkpoint:
    return Checkpoint.open(Path(ROOT) / "tests" / "checkpoints" / name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_rank_s_parameters_have_the_shapes_of_its_geometry(name: str) -> None:
    checkpoint = opened(name)
    for rank in range(2):
        shard = CheckpointShard(checkpoint, TensorParallel(2, rank))
        for spec in model_of(shard.geometry).parameters(shard.geometry):
            if spec.role is ParamRole.EXPERTS:
                experts, *rest = spec.shape
                assert shard.experts(spec.name).shape == (experts // 2, *rest)
            elif spec.role in (ParamRole.VECTOR, ParamRole.CONV):
                assert shard.vector(spec.name).shape == spec.shape
            else:
                rows = spec.shape[0] // 2 if spec.name == "lm_head.weight" else spec.shape[0]
                assert shard.matrix(spec.name).shape == (rows, *spec.shape[1:])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_ranks_together_hold_every_element_once(name: str) -> None:
    checkpoint = opened(name)
    shards = [CheckpointShard(checkpoint, TensorParallel(2, rank)) for rank in range(2)]
    for spec in model_of(checkpoint.geometry).parameters(checkpoint.geometry):
        if spec.cut is None:
            continue
        if spec.role is ParamRole.EXPERTS:
            whole, parts = checkpoint.experts(spec.name), [s.experts(spec.name) for s in shards]
            for e in range(len(whole)):
                part = parts[e // (len(whole) // 2)].matrix(e % (len(whole) // 2))
                np.testing.assert_array_equal(part.dequantize(), whole.matrix(e).dequantize())
            continue
        pieces = [values(shard, spec) for shard in shards]
        np.testing.assert_array_equal(joined(pieces, spec.cut), values(checkpoint, spec))


def values(source: WeightSource, spec: ParamSpec) -> np.ndarray:
    if spec.role in (ParamRole.VECTOR, ParamRole.CONV):
        return source.vector(spec.name)
    return source.matrix(spec.name).dequantize()


def joined(pieces: list[np.ndarray], cut: Cut) -> np.ndarray:
    """Span after span, the pieces of all ranks; a span with fewer units than ranks is the same on those that share."""
    spans: list[np.ndarray] = []
    starts = [0] * len(pieces)
    for span in cut.spans:
        widths = [len(TensorParallel(len(pieces), rank).channels(span)) for rank in range(len(pieces))]
        parts = [np.take(p, range(s, s + w), axis=cut.axis) for p, s, w in zip(pieces, starts, widths, strict=True)]
        starts = [s + w for s, w in zip(starts, widths, strict=True)]
        own = [TensorParallel(len(pieces), rank).units(span.units) for rank in range(len(pieces))]
        spans += [part for i, part in enumerate(parts) if own[i] not in own[:i]]
    return np.concatenate(spans, axis=cut.axis)


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("size", [2, 4])
def test_public_models_are_shared_evenly(preset: str, size: int) -> None:
    geometry = preset_geometry(preset)
    rank = shard_geometry(geometry, TensorParallel(size, size - 1))
    assert rank.ssm.heads * size == geometry.ssm.heads and rank.ssm.groups * size == geometry.ssm.groups
    assert rank.attention.heads * size == geometry.attention.heads
    assert rank.attention.kv_heads == max(geometry.attention.kv_heads // size, 1)
    assert rank.attention.heads % rank.attention.kv_heads == 0
    assert rank.layers == geometry.layers and rank.hidden == geometry.hidden and rank.vocab == geometry.vocab


@pytest.mark.parametrize("preset", preset_names())
def test_one_result_a_mixer_and_one_a_feed_forward_part_is_partial(preset: str) -> None:
    geometry = preset_geometry(preset)
    names = [n for n in partial_results(geometry) if not n.startswith("mtp.")]
    qwen = geometry.family.value == "qwen3_5"
    dense = len(geometry.layers) * 2 if qwen else len(geometry.layers)
    assert len(names) == dense
    assert LayerKind.SSM in geometry.layers


def test_few_key_heads_are_held_by_several_ranks() -> None:
    owners = [TensorParallel(4, rank).units(2) for rank in range(4)]
    assert owners == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]


def test_sizes_that_do_not_divide_are_named() -> None:
    geometry = preset_geometry(preset_names()[0])
    with pytest.raises(ConfigError, match=r"tensor parallel: size: expected a divisor of the .*, got 7"):
        shard_geometry(geometry, TensorParallel(7, 0))
    with pytest.raises(ConfigError, match="3 pieces"):
        TensorParallel(2, 0).units(3)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        TensorParallel(2, 2)


def test_scales_follow_their_elements() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (8, 32), dtype=np.uint8)
    blocks = rng.integers(1, 100, (8, 4)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    nvfp4 = Nvfp4Matrix(codes, blocks, 0.5, None)
    per_row = Fp8Matrix(codes[:, :16].view(ml_dtypes.float8_e4m3fn), rng.random((8, 1), np.float32), None)
    for matrix, columns in ((nvfp4, 64), (per_row, 16)):
        whole = matrix.dequantize()
        for axis, count in ((0, 8), (1, columns)):
            cut = Cut(axis, (Span(count, count),))
            parts = [cut_matrix(matrix, "m", cut, TensorParallel(2, rank)).dequantize() for rank in range(2)]
            np.testing.assert_array_equal(np.concatenate(parts, axis=axis), whole)


def test_a_block_is_never_cut() -> None:
    matrix = Nvfp4Matrix(np.zeros((4, 8), np.uint8), np.ones((4, 1), ml_dtypes.float8_e4m3fn), 1.0, None)
    with pytest.raises(ConfigError, match="columns of w in whole blocks of 16"):
        cut_matrix(matrix, "w", Cut(1, (Span(16, 16),)), TensorParallel(2, 0))


def test_random_numbers_of_a_head_do_not_depend_on_its_rank() -> None:
    whole = philox.state_words(7, layer=3, heads=8, elems=12, position=5)
    parts = [philox.state_words(7, layer=3, heads=4, elems=12, position=5, first_head=first) for first in (0, 4)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    seed, position = torch.tensor([7]), torch.tensor([5])
    ours = [state_words(seed, 3, 4, 12, position, first_head=first)[0] for first in (0, 4)]
    np.testing.assert_array_equal(torch.cat(ours).numpy(), whole)
