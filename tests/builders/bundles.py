"""Programs of checkpoints with their networks kept, and TensorRT sessions over an evaluator. No test here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from tests.builders.evaluator import NetworkEvaluator
from trtllm_replayssm.bindings import Program
from trtllm_replayssm.builders.compiler import Compiler
from trtllm_replayssm.builders.flavour import Flavour, FlavourName, load
from trtllm_replayssm.builders.native_weights import write_native_weights
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import Parameters
from trtllm_replayssm.builders.profiles import make_profiles
from trtllm_replayssm.builders.segments import Segment
from trtllm_replayssm.builders.trace import SegmentedOps, trace
from trtllm_replayssm.manifest import FORMAT_VERSION, BuildInfo, Manifest
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession, pools_of


@dataclass
class Traced:
    """Programs and, by engine name, the networks that a build would compile; the compiler keeps the library alive."""

    options: BuildOptions
    programs: dict[str, Program]
    segments: dict[str, Segment]
    compiler: Compiler
    parameters: Parameters
    shared: dict[str, str] = field(default_factory=dict)


def rtx(target: str = "12.0") -> Flavour:
    return load(FlavourName.RTX, target)


def trace_networks(parameters: Parameters, options: BuildOptions) -> Traced:
    """Everything a build does but compiling."""
    activation = options.activation.value
    compiler = Compiler(rtx(), profiles(options), slots=options.max_batch, activation=activation, tick=lambda: None)
    segments: dict[str, Segment] = {}
    shared: dict[str, str] = {}

    def emit(segment: Segment) -> str:
        name = shared.get(segment.share or "", f"{len(segments):03}")
        segments.setdefault(name, segment)
        if segment.share is not None:
            shared[segment.share] = name
        return name

    programs = trace(
        parameters, compiler.new_network, emit, lambda program, _: SegmentedOps(program, activation), segmented=True,
        activation=activation, depth=options.depth,
    )  # fmt: skip
    return Traced(options, programs, segments, compiler, parameters, shared)


def profiles(options: BuildOptions) -> dict[str, object]:
    return make_profiles(
        max_batch=options.max_batch, max_step_tokens=options.replay.max_step_tokens,
        context_rows=options.context_rows, context_tokens=options.context_tokens, max_seq_len=options.max_seq_len,
    )  # fmt: skip


class EvaluatorEngines:
    """Runs the networks of traced programs with torch, in the place of TensorRT."""

    def __init__(self, segments: Mapping[str, Segment]) -> None:
        self._evaluators = {name: NetworkEvaluator(segment.network) for name, segment in segments.items()}

    def run(self, engine: str, profile: int, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        results = self._evaluators[engine].run(inputs)
        assert results.keys() == outputs.keys()
        for name, out in outputs.items():
            assert out.dtype is results[name].dtype and out.shape == results[name].shape, name
            if out.data_ptr() != results[name].data_ptr():
                out.copy_(results[name])


def manifest_of(traced: Traced) -> Manifest:
    options = traced.options
    info = BuildInfo(
        flavour="tensorrt_rtx", tensorrt_version="none", product_version="none", target="12.0",
        activation=options.activation.value, weights=options.weights, max_batch=options.max_batch,
        max_seq_len=options.max_seq_len, context_rows=1, context_tokens=options.context_tokens, tp_size=1, tp_rank=0,
        peak_rss_bytes=0, seconds=0.0,
    )  # fmt: skip
    return Manifest(
        format_version=FORMAT_VERSION, build=info, geometry=traced.parameters.geometry, replay=options.replay,
        profiles=profiles(options), programs=traced.programs, files={},
    )  # fmt: skip


def evaluated_session(traced: Traced, directory: Path) -> TensorRtSession:
    """A session whose engines are evaluated; `directory` gets what native operations read."""
    write_native_weights(directory, traced.programs.values(), traced.parameters, lambda _: None)
    manifest = manifest_of(traced)
    return TensorRtSession(manifest, directory, EvaluatorEngines(traced.segments), pools_of(manifest, None, "cpu"))
