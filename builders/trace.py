"""Runs a model's networks over the TensorRT interpreter: twice each, so that the second pass knows the cuts."""

from __future__ import annotations

from collections.abc import Callable

from trtllm_replayssm.bindings import HIDDEN, HIDDEN_IN, IDS, LOGITS, Program
from trtllm_replayssm.builders.native_ops import NativeOps
from trtllm_replayssm.builders.network import Network
from trtllm_replayssm.builders.parameters import HollowParameters, Parameters
from trtllm_replayssm.builders.segments import Needs, ProgramBuilder, Segment
from trtllm_replayssm.builders.trt_graph import TrtGraph
from trtllm_replayssm.manifest import MAIN, MTP
from trtllm_replayssm.models import model_of


def trace(
    parameters: Parameters, new_network: Callable[[], Network], emit: Callable[[Segment], str],
    make_ops: Callable[[ProgramBuilder, Parameters], NativeOps], *, segmented: bool, activation: str, depth: int,
) -> dict[str, Program]:  # fmt: skip
    """Programs of the main network and, where the model has one, of the drafting head, as `main` and `mtp`.

    emit(segment) compiles a network and returns its engine's name; it is called in the order of the program's steps.
    depth: positions of a cache row.
    """
    programs = {}
    for name in (MAIN, MTP) if parameters.geometry.mtp_pattern else (MAIN,):
        needs = Needs()

        def run(source: Parameters, sink: Callable[[Segment], str], name: str = name, needs: Needs = needs) -> Program:
            program = ProgramBuilder(name, new_network, sink, needs, segmented=segmented)
            graph = TrtGraph(source, program, make_ops(program, source), activation=activation, depth=depth)
            return _forward(name, graph, source, program)

        run(HollowParameters(parameters), lambda _: "")
        programs[name] = run(parameters, emit)
    return programs


def _forward(name: str, graph: TrtGraph, source: Parameters, program: ProgramBuilder) -> Program:
    model, geometry = model_of(source.geometry), source.geometry
    if name == MAIN:
        output = model.forward(graph, geometry, graph.inputs[IDS])
    else:
        output = model.mtp_forward(graph, geometry, graph.inputs[IDS], graph.inputs[HIDDEN_IN])
    return program.finish({LOGITS: output.logits.name, HIDDEN: output.hidden.name})
