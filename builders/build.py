"""Builds an engine bundle: networks one after another, what native operations read, the record and the manifest."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_replayssm._version import __version__
from trtllm_replayssm.bindings import Program
from trtllm_replayssm.builders.build_log import EngineRecord
from trtllm_replayssm.builders.compiler import Compiler
from trtllm_replayssm.builders.destination import new_directory, write_json
from trtllm_replayssm.builders.flavour import Flavour, load
from trtllm_replayssm.builders.memory import peak_rss_bytes, release_mapped
from trtllm_replayssm.builders.native_ops import NativeOps, SegmentedOps
from trtllm_replayssm.builders.native_weights import write_native_weights
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import Parameters, RankParameters, matrix_formats, parameter_specs
from trtllm_replayssm.builders.plugin_layers import PluginOps
from trtllm_replayssm.builders.profiles import make_profiles
from trtllm_replayssm.builders.segments import Needs, ProgramBuilder, Segment
from trtllm_replayssm.builders.trace import trace
from trtllm_replayssm.manifest import (
    COMMIT_PROGRAM,
    FORMAT_VERSION,
    MAIN,
    BuildInfo,
    EngineMemory,
    Manifest,
    file_digest,
    to_json,
    write_manifest,
)
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.weights.matrix import MatrixFormat

BUILD_LOG = "build_log.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "vocab.json", "merges.txt",
)  # fmt: skip

Progress = Callable[[str, int], None]
"""progress(what is being done, engines finished so far); called often, may raise to stop the build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """manifest: as written; records: one per engine; largest_engine_bytes bounds the memory of a build."""

    manifest: Manifest
    records: tuple[EngineRecord, ...]

    @property
    def largest_engine_bytes(self) -> int:
        """Size of the largest engine file."""
        return max(record.bytes for record in self.records)


def build(
    parameters: Parameters, pretrained_config: Mapping[str, Any], destination: str | Path, options: BuildOptions, *,
    tokenizer: Path | None = None, with_weights: bool = True, plugin_library: str | Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:  # fmt: skip
    """Write a bundle to `destination`, which must not exist or be empty; it appears complete or not at all.

    parameters: of the whole model; one of several ranks (options.tp_size) takes its share of them.
    pretrained_config: the model's config.json, kept as it is. tokenizer: folder whose tokenizer files are copied.
    with_weights=False leaves out what native operations read: enough to study engines, not to run them.
    plugin_library: registers the plugins that flavour `tensorrt` needs.
    Raises ConfigError for bad settings, UnsupportedError for types that the target lacks, DeviceError when TensorRT
    refuses a network.
    """
    began = time.monotonic()
    flavour = load(options.flavour, options.target)
    if plugin_library is not None:
        flavour.load_plugins(Path(plugin_library))
    own = parameters if options.tp_size == 1 else RankParameters(parameters, options.parallel)
    _require_types(flavour, own)
    with new_directory("build", Path(destination)) as work:
        run = _Run(flavour, own, options, work, progress or (lambda what, done: None))
        programs = run.engines()
        if with_weights:
            write_native_weights(work, programs.values(), own, run.tick, packed=not flavour.segmented)
        write_json(work / BUILD_LOG, [to_json(record) for record in run.records])
        if tokenizer is not None:
            for name in _TOKENIZER_FILES:
                if (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, work / name)
        info = _build_info(flavour, options, parameters.identity, time.monotonic() - began)
        write_json(work / "config.json", _config(parameters, pretrained_config, options, info))
        run.tick("hashing")
        files = {str(p.relative_to(work)): file_digest(p) for p in sorted(work.rglob("*")) if p.is_file()}
        manifest = Manifest(
            format_version=FORMAT_VERSION, build=info, geometry=parameters.geometry, replay=options.replay,
            profiles=run.profiles, programs=programs,
            memory={r.engine: EngineMemory(shared=r.scratch_bytes, own=r.kept_bytes) for r in run.records}, files=files,
        )  # fmt: skip
        write_manifest(work, manifest)
    return BuildReport(manifest=manifest, records=tuple(run.records))


class _Run:
    """The engines of one build."""

    def __init__(
        self, flavour: Flavour, parameters: Parameters, options: BuildOptions, work: Path, progress: Progress
    ) -> None:
        self.records: list[EngineRecord] = []
        self.profiles = make_profiles(
            max_batch=options.max_batch, max_step_tokens=options.replay.max_step_tokens,
            context_rows=options.context_rows, context_tokens=options.context_tokens, max_seq_len=options.max_seq_len,
        )  # fmt: skip
        self._flavour = flavour
        self._parameters = parameters
        self._options = options
        self._work = work
        self._progress = progress
        self._label = "reading the model"
        self._shared: dict[str, str] = {}
        self._compiler = Compiler(
            flavour, self.profiles, slots=options.max_batch, activation=options.activation.value,
            tick=lambda: self.tick(self._label),
        )  # fmt: skip

    def tick(self, what: str) -> None:
        """Report progress."""
        self._progress(what, len(self.records))

    def engines(self) -> dict[str, Program]:
        """Compile every network; with plugins also the one that moves the cursors after a step."""
        segmented = self._flavour.segmented
        programs = trace(
            self._parameters, self._compiler.new_network, self._emit, self._make_ops, segmented=segmented,
            activation=self._options.activation.value, depth=self._options.depth,
        )  # fmt: skip
        if not segmented:
            builder = ProgramBuilder(COMMIT_PROGRAM, self._compiler.new_network, self._emit, Needs(), segmented=False)
            programs[COMMIT_PROGRAM] = PluginOps(
                builder, self._parameters, self._options, self._flavour.trt
            ).commit()
        return programs

    def _make_ops(self, program: ProgramBuilder, parameters: Parameters) -> NativeOps:
        if self._flavour.segmented:
            return SegmentedOps(program, self._options.activation.value)
        return PluginOps(program, parameters, self._options, self._flavour.trt)

    def _emit(self, segment: Segment) -> str:
        if segment.share is not None and segment.share in self._shared:
            return self._shared[segment.share]
        self._label = segment.label
        self.tick(segment.label)
        name = self._engine_name(segment)
        path = self._work / name
        path.parent.mkdir(exist_ok=True)
        self.records.append(self._compiler.compile(segment, path, name))
        release_mapped(constant.array for constant in segment.network.constants.values())
        if segment.share is not None:
            self._shared[segment.share] = name
        return name

    def _engine_name(self, segment: Segment) -> str:
        if self._flavour.segmented:
            return f"segments/{len(self.records):03}.engine"
        suffix = f".{segment.program}" if segment.program != MAIN else ""
        return f"rank{self._options.tp_rank}{suffix}.engine"


def _require_types(flavour: Flavour, parameters: Parameters) -> None:
    """Refuse a target that lacks a type of the matrices that TensorRT itself multiplies; experts are not among them."""
    specs = parameter_specs(parameters.geometry)
    dense = {f for name, f in matrix_formats(parameters).items() if specs[name].role is not ParamRole.EXPERTS}
    flavour.require(fp4=MatrixFormat.NVFP4 in dense, fp8=MatrixFormat.FP8 in dense)


def _build_info(flavour: Flavour, options: BuildOptions, checkpoint: str, seconds: float) -> BuildInfo:
    return BuildInfo(
        flavour=flavour.name.value, tensorrt_version=str(flavour.trt.__version__), product_version=__version__,
        target=options.target, activation=options.activation.value, weights=options.weights,
        checkpoint=checkpoint, max_batch=options.max_batch, max_seq_len=options.max_seq_len,
        context_rows=options.context_rows, context_tokens=options.context_tokens, tp_size=options.tp_size,
        tp_rank=options.tp_rank, peak_rss_bytes=peak_rss_bytes(), seconds=round(seconds, 3),
    )  # fmt: skip


def _config(
    parameters: Parameters, pretrained: Mapping[str, Any], options: BuildOptions, info: BuildInfo
) -> dict[str, Any]:
    """config.json: keys modelled on TensorRT-LLM's, ours under `replayssm`."""
    formats = matrix_formats(parameters)
    counts = {fmt.value: sum(f is fmt for f in formats.values()) for fmt in MatrixFormat}
    return {
        "pretrained_config": dict(pretrained),
        "build_config": {
            "max_batch_size": options.max_batch, "max_seq_len": options.max_seq_len,
            "max_num_tokens": options.context_rows * options.context_tokens,
            "max_draft_len": options.replay.max_step_tokens - 1, "strongly_typed": True,
            "tensor_parallel": options.tp_size,
        },
        "replayssm": {
            "flavour": info.flavour, "tensorrt_version": info.tensorrt_version, "target": options.target,
            "weights": options.weights, "replay": to_json(options.replay),
            "matrices": {fmt: count for fmt, count in counts.items() if count},
        },
    }  # fmt: skip
