"""Programs of checkpoints with their networks kept, and TensorRT sessions over an evaluator. No test here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import tensorrt_rtx
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from tests.builders.evaluator import NetworkEvaluator
from tests.builders.recorded_tensorrt import PluginCall, Recorded, RecordedTensorRt
from tests.parallel.thread_ranks import ThreadRanks
from trtllm_replayssm.bindings import Program
from trtllm_replayssm.builders.compiler import Compiler
from trtllm_replayssm.builders.flavour import CURRENT, Flavour, FlavourName, load
from trtllm_replayssm.builders.native_ops import NativeOps, SegmentedOps
from trtllm_replayssm.builders.native_weights import write_native_weights
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import Parameters, RankParameters
from trtllm_replayssm.builders.plugin_layers import PluginOps
from trtllm_replayssm.builders.profiles import make_profiles
from trtllm_replayssm.builders.segments import ProgramBuilder, Segment
from trtllm_replayssm.builders.trace import trace
from trtllm_replayssm.manifest import FORMAT_VERSION, BuildInfo, Manifest, Profile
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession, pools_of
from trtllm_replayssm.shapes import ModelGeometry


@dataclass
class Traced:
    """Programs and, by engine name, the networks that a build would compile. parameters: the rank's, geometry: whole.

    calls: the plugin layers of each network; compiler: keeps the library's objects alive.
    """

    options: BuildOptions
    flavour: Flavour
    programs: dict[str, Program]
    segments: dict[str, Segment]
    calls: dict[str, list[PluginCall]]
    compiler: Compiler
    parameters: Parameters
    geometry: ModelGeometry


def trace_networks(whole: Parameters, options: BuildOptions) -> Traced:
    """Everything a build does but compiling; flavour `tensorrt` over the stand-in for the library."""
    parameters = whole if options.tp_size == 1 else RankParameters(whole, options.parallel)
    recorded = Recorded()
    plugins = options.flavour is FlavourName.TENSORRT
    flavour = load(FlavourName.RTX, "12.0")
    if plugins:
        flavour = Flavour(FlavourName.TENSORRT, CURRENT, RecordedTensorRt(recorded))
    activation = options.activation.value
    compiler = Compiler(flavour, profiles(options), slots=options.max_batch, activation=activation, tick=lambda: None)
    segments: dict[str, Segment] = {}
    calls: dict[str, list[PluginCall]] = {}
    shared: dict[str, str] = {}

    def emit(segment: Segment) -> str:
        name = shared.get(segment.share or "", f"{len(segments):03}")
        segments.setdefault(name, segment)
        names = {definition_of(segment).get_input(i).name for i in range(definition_of(segment).num_inputs)}
        # the first pass made plugin layers too, of networks that are gone
        calls[name] = [c for c in recorded.calls if names.intersection(c.outputs)]
        if segment.share is not None:
            shared[segment.share] = name
        return name

    def make_ops(program: ProgramBuilder, source: Parameters) -> NativeOps:
        return PluginOps(program, source, options, flavour.trt) if plugins else SegmentedOps(program, activation)

    programs = trace(
        parameters, compiler.new_network, emit, make_ops, segmented=not plugins, activation=activation,
        depth=options.depth,
    )  # fmt: skip
    return Traced(options, flavour, programs, segments, calls, compiler, parameters, whole.geometry)


def definition_of(segment: Segment) -> tensorrt_rtx.INetworkDefinition:
    """The network itself, without the stand-in's checks."""
    return getattr(segment.network.definition, "real", segment.network.definition)


def profiles(options: BuildOptions) -> dict[str, Profile]:
    return make_profiles(
        max_batch=options.max_batch, max_step_tokens=options.replay.max_step_tokens,
        context_rows=options.context_rows, context_tokens=options.context_tokens, max_seq_len=options.max_seq_len,
    )  # fmt: skip


class EvaluatorEngines:
    """Runs the networks of traced programs with torch, in the place of TensorRT. ranks: see `NetworkEvaluator`."""

    def __init__(self, traced: Traced, ranks: ThreadRanks | None = None) -> None:
        self._evaluators = {
            name: NetworkEvaluator(
                tensorrt_rtx, definition_of(segment), segment.network.constants, traced.calls[name], ranks
            )
            for name, segment in traced.segments.items()
        }

    def bind(
        self, engine: str, profile: int, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, own: bool
    ) -> Callable[[], None]:
        def run() -> None:
            with disable_current_modes():  # the device's work
                results = self._evaluators[engine].run(inputs)
            assert results.keys() == outputs.keys()
            for name, out in outputs.items():
                got = results[name]
                assert (out.dtype, out.shape) == (got.dtype, got.shape), (name, out.shape, got.dtype, got.shape)
                if out.data_ptr() != got.data_ptr():
                    out.copy_(got)

        return run

    def obstacle(self) -> str | None:
        return None

    def save_kernels(self) -> None:
        pass


def manifest_of(traced: Traced) -> Manifest:
    options = traced.options
    info = BuildInfo(
        flavour=traced.flavour.name.value, tensorrt_version="none", product_version="none", target="12.0",
        activation=options.activation.value, weights=options.weights, checkpoint="none", max_batch=options.max_batch,
        max_seq_len=options.max_seq_len, context_rows=1, context_tokens=options.context_tokens, tp_size=options.tp_size,
        tp_rank=options.tp_rank, peak_rss_bytes=0, seconds=0.0,
    )  # fmt: skip
    return Manifest(
        format_version=FORMAT_VERSION, build=info, geometry=traced.geometry, replay=options.replay,
        profiles=profiles(options), programs=traced.programs, memory={}, files={},
    )  # fmt: skip


def evaluated_session(traced: Traced, directory: Path, ranks: ThreadRanks | None = None) -> TensorRtSession:
    """A session whose engines are evaluated; `directory` gets what native operations read. ranks: it is one of them."""
    packed = not traced.flavour.segmented
    write_native_weights(directory, traced.programs.values(), traced.parameters, lambda _: None, packed=packed)
    manifest = manifest_of(traced)
    engines = EvaluatorEngines(traced, ranks)
    return TensorRtSession(manifest, directory, engines, pools_of(manifest, None, "cpu"), ranks)
