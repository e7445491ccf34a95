"""Bundles of two ranks: real builds, whose bytes the networks hold, what `inspect` tells, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import trace_networks
from tests.builders.engine_rules import (
    assert_all_matmuls_named,
    assert_no_cache_copies,
    assert_quantised_matmuls,
    assert_scratch_bound,
)
from tests.builders.quantised import TINY, mixed_checkpoint
from tests.builders.test_network_weights import constants_of, dense_names, formats_bit_for_bit
from tests.builders.test_preset_builds import OPTIONS, PERIODS, assert_rules
from tests.builders.test_tiny_builds import check_steps, options
from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.builders.build_ranks import build_ranks
from trtllm_replayssm.builders.native_weights import write_native_weights
from trtllm_replayssm.builders.parameters import CheckpointParameters, RankParameters
from trtllm_replayssm.builders.random_weights import RandomParameters
from trtllm_replayssm.builders.sources import checkpoint_source
from trtllm_replayssm.bundle_parts import bundle_parts, read_parts
from trtllm_replayssm.cli import main
from trtllm_replayssm.errors import ConfigError, EngineMismatchError
from trtllm_replayssm.manifest import check_files, read_manifest, write_manifest
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.session.tensorrt_weights import BundleWeights
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import MatrixFormat, Nvfp4Matrix
from trtllm_replayssm.weights.precision_maps import QWEN_122B, SUPER
from trtllm_replayssm.weights.presets import preset_config, preset_geometry, slice_geometry
from trtllm_replayssm.weights.shard import CheckpointShard
from trtllm_replayssm.weights.tensor_parallel import TensorParallel

SMALL = str(CHECKPOINTS / "qwen-moe")
FLAGS = ["--target", "12.0", "--max-seq-len", "64", "--context-tokens", "16", "--max-batch-size", "2", "--tp-size", "2"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "bundle"
    assert main(["build", SMALL, "--output", str(path), *FLAGS]) == 0
    return path


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", TINY)
def test_a_rank_s_networks_hold_its_cuts_of_the_checkpoint_bit_for_bit(name: str, rank: int, tmp_path: Path) -> None:
    wanted = replace(options("12.0"), tp_size=2, tp_rank=rank)
    formats = set()
    with Checkpoint.open(mixed_checkpoint(name)) as checkpoint:
        share = CheckpointShard(checkpoint, TensorParallel(2, rank))
        traced = trace_networks(CheckpointParameters(checkpoint), wanted)
        constants = constants_of(traced)
        formats |= formats_bit_for_bit(constants, share, dense_names(checkpoint))
        write_native_weights(tmp_path, traced.programs.values(), traced.parameters, lambda _: None, packed=False)
        beside = BundleWeights(tmp_path, share.geometry, share.parallel)
        for spec in map(checkpoint.spec, checkpoint.names()):
            if spec.role is ParamRole.EXPERTS:
                whole, own = checkpoint.experts(spec.name), beside.experts(spec.name)
                assert len(own) == len(whole) // 2
                for e in range(len(own)):
                    ours, theirs = own.matrix(e), whole.matrix(rank * len(own) + e)
                    assert isinstance(ours, Nvfp4Matrix) and isinstance(theirs, Nvfp4Matrix)
                    assert ours.packed.tobytes() == theirs.packed.tobytes()
                    assert ours.block_scale.tobytes() == theirs.block_scale.tobytes()
                    assert ours.scale_2 == theirs.scale_2
        vectors = {n for p in traced.programs.values() for s in p.steps for n in getattr(s, "weights", {}).values()}
        for vector in vectors - set(checkpoint.matrix_names()):
            np.testing.assert_array_equal(beside.vector(vector), share.vector(vector))
    assert {MatrixFormat.NVFP4, MatrixFormat.FP8, MatrixFormat.BF16} <= formats


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron-moe-tiny", "qwen3_5-tiny"])
def test_both_ranks_of_a_mixed_checkpoint_build_and_run_their_quantised_matmuls(name: str, tmp_path: Path) -> None:
    wanted = replace(options("12.0"), tp_size=2)
    with checkpoint_source(mixed_checkpoint(name), wanted) as source:
        reports = build_ranks(
            source.parameters, source.config, tmp_path / "bundle", wanted, ranks=(0, 1), tokenizer=source.tokenizer
        )
        for rank, report in enumerate(reports):
            own = RankParameters(source.parameters, TensorParallel(2, rank))
            assert_quantised_matmuls(report.manifest, report.records, own)
            assert_all_matmuls_named(report.records, own)
            assert_scratch_bound(report.manifest, report.records)
            attention = own.geometry.attention
            if attention.heads > attention.kv_heads:  # else the compiler rearranges the cache of a lone query head
                assert_no_cache_copies(report.manifest, report.records)
    for (folder, manifest), report in zip(read_parts(tmp_path / "bundle"), reports, strict=True):
        assert manifest == report.manifest and manifest.geometry == source.parameters.geometry
        check_files(folder, manifest)
        assert (folder / "tokenizer.json").is_file()
        for program in manifest.programs.values():
            check_steps(program.steps, folder)
    shutil.rmtree(tmp_path / "bundle")


@pytest.mark.slow
@pytest.mark.parametrize("preset", [SUPER, QWEN_122B])
def test_a_rank_s_decoder_period_builds_at_real_shapes(preset: str, tmp_path: Path) -> None:
    """Half of the heads, one cache head, half of the dense columns: the rules of one GPU hold for the last rank."""
    layers, _ = PERIODS[preset]
    geometry = replace(slice_geometry(preset_geometry(preset), layers, mtp=True), vocab=4096)
    parameters, wanted = RandomParameters(geometry, preset, first_layer=layers[0]), replace(OPTIONS, tp_size=2)
    (report,) = build_ranks(
        parameters, preset_config(preset), tmp_path / "bundle", wanted, ranks=(1,), with_weights=False
    )
    shutil.rmtree(tmp_path / "bundle")
    assert_rules(report, RankParameters(parameters, TensorParallel(2, 1)))


def test_inspect_shows_every_rank(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [path.name for path in bundle_parts(bundle)] == ["rank0", "rank1"]
    assert main(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert ", rank 0 of 2: engines of tensorrt_rtx" in shown and ", rank 1 of 2: engines" in shown
    assert "RankSum" in shown and "1 RankJoin" in shown
    assert main(["inspect", str(bundle), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(r["build"]["tp_size"], r["build"]["tp_rank"]) for r in ranks] == [(2, 0), (2, 1)]
    assert ranks[0]["programs"] == ranks[1]["programs"]


def test_ranks_built_one_by_one_are_a_whole_bundle_together(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = tmp_path / "alone"
    assert main(["build", SMALL, "--output", str(alone), *FLAGS, "--tp-rank", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tp_ranks"] == [1]
    assert main(["inspect", str(alone)]) == 0
    with pytest.raises(EngineMismatchError, match=r"all 2 ranks, from rank0 on, got those of 1\. Build with"):
        read_parts(alone)
    shutil.copytree(bundle / "rank0", alone / "rank0")
    assert [manifest.build.tp_rank for _, manifest in read_parts(alone)] == [0, 1]
    programs = [read_manifest(folder / "rank1").programs for folder in (alone, bundle)]
    assert programs[0] == programs[1]


def test_ranks_that_were_built_otherwise_are_refused_by_the_first_difference(bundle: Path, tmp_path: Path) -> None:
    for rank in ("rank0", "rank1"):
        (tmp_path / rank).mkdir()
        manifest = read_manifest(bundle / rank)
        if rank == "rank1":
            manifest = replace(manifest, build=replace(manifest.build, max_batch=3))
        write_manifest(tmp_path / rank, manifest)
    with pytest.raises(EngineMismatchError, match=r"rank1: build\.max_batch: expected 2, got 3"):
        read_parts(tmp_path)
    shutil.rmtree(tmp_path / "rank1")
    shutil.copytree(tmp_path / "rank0", tmp_path / "rank1")  # a folder of the wrong name
    with pytest.raises(EngineMismatchError, match=r"got those of 0, 0"):
        read_parts(tmp_path)


def test_ranks_of_two_checkpoints_of_one_geometry_are_refused(bundle: Path, tmp_path: Path) -> None:
    """Config, shapes and settings are the same; one matrix has other values."""
    other = tmp_path / "checkpoint"
    shutil.copytree(SMALL, other)
    file = other / "model.safetensors"
    tensors = {name: np.copy(values) for name, values in load_file(file).items()}
    norm = min(name for name in tensors if name.endswith("layernorm.weight"))
    tensors[norm] += tensors[norm].dtype.type(1)
    save_file(tensors, file, metadata={"format": "pt"})
    whole = tmp_path / "whole"
    assert main(["build", str(other), "--output", str(whole), *FLAGS, "--tp-rank", "1"]) == 0
    shutil.copytree(bundle / "rank0", whole / "rank0")
    with pytest.raises(EngineMismatchError, match=r"rank1: build\.checkpoint: expected sha256:\w{64}, got sha256:"):
        read_parts(whole)


def test_folders_count_by_their_exact_names_and_sizes_cost_nothing(bundle: Path, tmp_path: Path) -> None:
    for folder, rank, size in (("rank0", 0, 10**12), ("rank1", 1, 10**12), ("rank01", 1, 2), ("rank\u0661", 1, 2)):
        manifest = read_manifest(bundle / f"rank{rank}")
        (tmp_path / folder).mkdir()
        write_manifest(tmp_path / folder, replace(manifest, build=replace(manifest.build, tp_size=size)))
    assert [path.name for path in bundle_parts(tmp_path)] == ["rank0", "rank1"]
    with pytest.raises(EngineMismatchError, match=f"all {10**12} ranks"):
        read_parts(tmp_path)


def test_a_part_and_a_wish_for_another_number_of_gpus_are_refused(bundle: Path) -> None:
    with pytest.raises(EngineMismatchError, match="all 2 ranks"):
        LLM(bundle / "rank1")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: expected 2, as the bundle was built") as caught:
        LLM(bundle, tensor_parallel_size=4)
    assert caught.value.argument == "tensor_parallel_size"
    with pytest.raises(ConfigError, match="2 NVIDIA GPUs of compute capability 12"):
        LLM(bundle)


def test_a_stopped_build_of_ranks_leaves_nothing(tmp_path: Path) -> None:
    wanted = replace(options("12.0"), tp_size=2)

    def stop(what: str, done: int) -> None:
        if what.startswith("rank 1"):
            raise KeyboardInterrupt

    with checkpoint_source(SMALL, wanted) as source, pytest.raises(KeyboardInterrupt):
        build_ranks(source.parameters, source.config, tmp_path / "bundle", wanted, ranks=(0, 1), progress=stop)
    assert not list(tmp_path.iterdir())
