"""Engines at the sizes of the four public models, random weights in the public formats, compiled for 12.0.

One decoder period of each: every kind of layer, at real widths, batch 64, 8192 positions. The vocabulary is cut to 4096
(embedding and output head are the same two layers at any size); one test has the whole vocabulary, to bound memory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.engine_rules import (
    MIB,
    assert_all_matmuls_named,
    assert_no_cache_copies,
    assert_quantised_matmuls,
    assert_scratch_bound,
    cache_bytes,
)
from trtllm_replayssm.builders.build import BuildReport, build
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import Parameters
from trtllm_replayssm.builders.quantised_parameters import DenseNvfp4Parameters
from trtllm_replayssm.builders.random_weights import RandomParameters
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.shapes import LayerKind
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.precision_maps import QWEN_122B, SUPER, published_format
from trtllm_replayssm.weights.presets import preset_config, preset_geometry, slice_geometry

# preset -> (layers, kinds that they hold)
PERIODS = {
    "nemotron-3-nano-4b": ((11, 13), {LayerKind.SSM, LayerKind.ATTENTION, LayerKind.MLP}),
    SUPER: ((0, 7), {LayerKind.SSM, LayerKind.ATTENTION, LayerKind.MOE}),
    "qwen3.5-4b": ((0, 3), {LayerKind.SSM, LayerKind.ATTENTION}),
    QWEN_122B: ((0, 3), {LayerKind.SSM, LayerKind.ATTENTION}),
}
OPTIONS = BuildOptions(
    target="12.0", replay=ReplayConfig(window=16, max_step_tokens=4), max_batch=64, max_seq_len=8192,
    context_tokens=2048,
)  # fmt: skip
# Beyond 2.3 times the largest engine a build may hold this much: the libraries and what they allocate at start.
PROCESS_BYTES = 400 * MIB


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Path]:
    """Where a bundle is built; gone after the test, since pytest keeps the folders of several runs."""
    yield tmp_path / "bundle"
    shutil.rmtree(tmp_path / "bundle", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PERIODS)
def test_one_decoder_period_builds_at_real_shapes(preset: str, destination: Path) -> None:
    layers, kinds = PERIODS[preset]
    geometry = replace(slice_geometry(preset_geometry(preset), layers, mtp=True), vocab=4096)
    assert set(geometry.layers) == kinds
    parameters = RandomParameters(geometry, preset, first_layer=layers[0])
    report = build(parameters, preset_config(preset), destination, OPTIONS, with_weights=False)
    assert_rules(report, parameters)
    # the bound above means something only while a copy of a cache would break it
    decode = [size for record in report.records for size in record.scratch_bytes[1:]]
    assert max(decode) < cache_bytes(report.manifest, OPTIONS.max_batch, itemsize=2)


@pytest.mark.slow
def test_dense_layers_quantised_while_building_run_in_fp4_at_real_shapes(destination: Path) -> None:
    preset = "nemotron-3-nano-4b"
    layers, _ = PERIODS[preset]
    geometry = replace(slice_geometry(preset_geometry(preset), layers, mtp=False), vocab=4096)
    parameters = DenseNvfp4Parameters(RandomParameters(geometry, preset, first_layer=layers[0]))
    report = build(parameters, preset_config(preset), destination, OPTIONS, with_weights=False)
    assert_rules(report, parameters)
    assert sum(len(record.quantised) for record in report.records) == 8  # two SSM, four attention, two MLP


def assert_rules(report: BuildReport, parameters: Parameters) -> None:
    """The rules of every build."""
    assert_quantised_matmuls(report.manifest, report.records, parameters)
    assert_all_matmuls_named(report.records, parameters)
    assert_no_cache_copies(report.manifest, report.records)
    assert_scratch_bound(report.manifest, report.records)


def test_the_precision_map_of_super_has_the_published_numbers() -> None:
    """40,961 NVFP4 and 139 FP8 matrices, of which one NVFP4 outside the experts."""
    geometry = preset_geometry(SUPER)
    counts = dict.fromkeys(MatrixFormat, 0)
    for spec in model_of(geometry).parameters(geometry):
        if spec.role in (ParamRole.LINEAR, ParamRole.EXPERTS):
            counts[published_format(SUPER, spec.name)] += spec.shape[0] if spec.role is ParamRole.EXPERTS else 1
    assert (counts[MatrixFormat.NVFP4], counts[MatrixFormat.FP8]) == (40961, 139)


def test_a_slice_keeps_the_formats_of_its_own_layers() -> None:
    assert published_format(SUPER, "backbone.layers.0.mixer.in_proj.weight", 6) is MatrixFormat.FP8
    assert published_format(SUPER, "backbone.layers.0.mixer.in_proj.weight", 22) is MatrixFormat.BF16


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_engine(destination: Path) -> None:
    """The whole vocabulary of Super: two engines of a gigabyte each, in a process of their own."""
    command = [
        sys.executable, "-m", "trtllm_replayssm", "build", "--preset", SUPER, "--random-weights", "--layers", "0-0",
        "--no-mtp", "--engines-only", "--target", "12.0", "--json", "--output", str(destination),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    report = json.loads(done.stdout)
    assert report["largest_engine_bytes"] >= 1024 * MIB
    assert report["peak_rss_bytes"] <= 2.3 * report["largest_engine_bytes"] + PROCESS_BYTES
    assert report["peak_rss_bytes"] < report["engine_bytes"] * 2.3
