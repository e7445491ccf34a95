"""Real engines of the four tiny checkpoints, without a GPU: BF16 for 8.9 and 12.0, NVFP4 and FP8 mixes for 12.0.

What the compiler made is read from its own record: which matmul runs in which type, by name; that no cache is copied;
that scratch is bounded. The engines cannot be run on this machine; what their networks compute is checked elsewhere.

Where an original is not installed, a narrower checkpoint of the same kind stands for it (tests/builders/stand_ins.py).
Types, names and cache copies are checked there as strictly: they depend on no size. The bound of scratch says little at
64 columns; test_preset_builds holds it at real shapes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.engine_rules import (
    assert_all_matmuls_named,
    assert_no_cache_copies,
    assert_quantised_matmuls,
    assert_scratch_bound,
)
from tests.builders.quantised import TINY, bf16_checkpoint, mixed_checkpoint
from trtllm_replayssm.bindings import LOGITS, EngineStep, OpStep
from trtllm_replayssm.builders.build import BuildReport, build
from trtllm_replayssm.builders.inspect_bundle import read_records, summarise_bundle
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import parameter_specs
from trtllm_replayssm.builders.sources import checkpoint_source
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.manifest import check_files, read_manifest
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.shapes import LayerKind

REPLAY = ReplayConfig(window=16, max_step_tokens=4)


def options(target: str, weights: str = "checkpoint") -> BuildOptions:
    return BuildOptions(
        target=target, replay=REPLAY, max_batch=8, max_seq_len=509, context_tokens=128, weights=weights
    )


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Path]:
    """Where a bundle is built; gone after the test, since pytest keeps the folders of several runs."""
    yield tmp_path / "bundle"
    shutil.rmtree(tmp_path / "bundle", ignore_errors=True)


def build_and_check(checkpoint: Path, destination: Path, wanted: BuildOptions) -> BuildReport:
    with checkpoint_source(checkpoint, wanted) as source:
        report = build(source.parameters, source.config, destination, wanted, tokenizer=source.tokenizer)
        assert_quantised_matmuls(report.manifest, report.records, source.parameters)
        assert_all_matmuls_named(report.records, source.parameters)
    assert_no_cache_copies(report.manifest, report.records)
    assert_scratch_bound(report.manifest, report.records)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("target", ["8.9", "12.0"])
@pytest.mark.parametrize("name", TINY)
def test_bf16_checkpoints_build(name: str, target: str, destination: Path) -> None:
    report = build_and_check(bf16_checkpoint(name), destination, options(target))
    manifest = read_manifest(destination)
    assert manifest == report.manifest
    check_files(destination, manifest)
    assert read_records(destination) == report.records
    assert (destination / "tokenizer.json").is_file()
    for program in manifest.programs.values():
        check_steps(program.steps, destination)
        assert program.tensors[program.outputs[LOGITS]].dtype == "float32"
    geometry = manifest.geometry
    ops = [step.op for step in manifest.programs["main"].steps if isinstance(step, OpStep)]
    assert ops.count("CausalConv1dReplay") == len(geometry.ssm_layers)
    assert ops.count("Mamba2Replay") + ops.count("GatedDeltaNetReplay") == len(geometry.ssm_layers)
    assert ("mtp" in manifest.programs) == (name == "qwen3_5-tiny")
    if "mtp" in manifest.programs:  # the embedding and the output head are engines of both networks
        engines = {
            n: [step.engine for step in program.steps if isinstance(step, EngineStep)]
            for n, program in manifest.programs.items()
        }
        assert set(engines["main"]) & set(engines["mtp"]) == {engines["main"][0], engines["main"][-1]}
    summary = summarise_bundle(destination)
    assert summary["memory"]["engine_bytes"] == sum(p.stat().st_size for p in (destination / "segments").iterdir())


def check_steps(steps: tuple[EngineStep | OpStep, ...], destination: Path) -> None:
    """Every tensor is written before a step reads it, unless it comes from outside; every engine is there."""
    outside = {"ids", "position", "positions", "token_index", "hidden_in"}
    written: set[str] = set()
    for step in steps:
        if isinstance(step, EngineStep):
            assert (destination / step.engine).is_file()
            reads = set(step.inputs.values())
        else:
            reads = {view.tensor for view in step.inputs.values()}
        missing = {r for r in reads - written - outside if not r.endswith((".keys", ".values"))}
        assert not missing, (step, missing)
        written |= set(step.outputs.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_mixed_checkpoints_run_their_quantised_matmuls_in_fp4_and_fp8(name: str, destination: Path) -> None:
    report = build_and_check(mixed_checkpoint(name), destination, options("12.0"))
    geometry = report.manifest.geometry
    formats = [fmt.value for record in report.records for fmt in record.quantised.values()]
    # one input projection a recurrent layer, one output projection an attention; the rest of the main network is NVFP4
    fp8 = len(geometry.ssm_layers) + geometry.layers.count(LayerKind.ATTENTION)
    assert formats.count("fp8") == fp8
    assert formats.count("nvfp4") == sum(map(is_dense, parameter_specs(geometry).values())) - fp8


def is_dense(spec: ParamSpec) -> bool:
    """Whether it is a matrix that the recipe "dense" quantises: neither output head nor drafting head nor a gate."""
    kept = spec.name == "lm_head.weight" or spec.name.startswith("mtp.") or spec.name.endswith("expert_gate.weight")
    return spec.role is ParamRole.LINEAR and not kept


@pytest.mark.parametrize(("weights", "refused"), [("checkpoint", True), ("bf16", False)])
def test_a_gpu_without_fp4_is_refused_unless_the_weights_are_dequantised(
    weights: str, refused: bool, destination: Path
) -> None:
    wanted = options("8.9", weights)
    with checkpoint_source(mixed_checkpoint("nemotron-tiny"), wanted, mtp=False) as source:
        if not refused:
            build(source.parameters, source.config, destination, wanted, with_weights=False)
            return
        with pytest.raises(UnsupportedError, match="--weights bf16"):
            build(source.parameters, source.config, destination, wanted)
    assert not list(destination.parent.iterdir())
