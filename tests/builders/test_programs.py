"""Programs of whole public models: order of steps, nothing carried that nobody reads, few segments. No compilation."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import Traced, trace_networks
from trtllm_replayssm.bindings import ALIAS_SUFFIX, MOE, EngineStep, OpStep, Program
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import HollowParameters
from trtllm_replayssm.builders.random_weights import RandomParameters
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.shapes import LayerKind
from trtllm_replayssm.weights.presets import preset_geometry, preset_names

OUTSIDE = {"ids", "position", "positions", "token_index", "hidden_in"}


@pytest.fixture(scope="module", params=preset_names())
def traced(request: pytest.FixtureRequest) -> Traced:
    geometry = preset_geometry(request.param)
    options = BuildOptions(target="12.0", replay=ReplayConfig(max_step_tokens=4))
    return trace_networks(HollowParameters(RandomParameters(geometry, request.param)), options)


def reads(step: EngineStep | OpStep) -> set[str]:
    if isinstance(step, EngineStep):
        return set(step.inputs.values())
    return {view.tensor for view in step.inputs.values()}


def is_cache(name: str) -> bool:
    return name.removesuffix(ALIAS_SUFFIX).endswith((".keys", ".values"))


def test_every_tensor_is_written_once_and_before_it_is_read(traced: Traced) -> None:
    for program in traced.programs.values():
        written: set[str] = set()
        for step in program.steps:
            missing = {name for name in reads(step) - written - OUTSIDE if not is_cache(name)}
            assert not missing, (step, missing)
            new = set(step.outputs.values())
            assert not new & written
            written |= new
        assert set(program.outputs.values()) <= written
        assert set(program.tensors) == written | {n for step in program.steps for n in reads(step)}


def test_nothing_crosses_a_cut_that_nobody_reads(traced: Traced) -> None:
    for program in traced.programs.values():
        read = {name for step in program.steps for name in reads(step)} | set(program.outputs.values())
        unread = {n for step in program.steps for n in step.outputs.values() if n not in read and not is_cache(n)}
        assert not unread, unread


def test_views_lie_within_their_tensors(traced: Traced) -> None:
    for program in traced.programs.values():
        for step in program.steps:
            for view in step.inputs.values() if isinstance(step, OpStep) else ():
                width = program.tensors[view.tensor].dims[-1]
                assert isinstance(width, int) and view.start >= 0 and view.start + view.width <= width


def engines(program: Program) -> int:
    return sum(isinstance(step, EngineStep) for step in program.steps)


def test_a_recurrent_layer_costs_one_segment(traced: Traced) -> None:
    """One before every recurrence and every block of experts, two more around every attention, embedding and head."""
    geometry = traced.parameters.geometry
    main = traced.programs["main"]
    ops = Counter(step.op for step in main.steps if isinstance(step, OpStep))
    blocks = geometry.layers.count(LayerKind.MOE) if LayerKind.MOE in geometry.layers else 0
    if geometry.moe is not None and not blocks:
        blocks = len(geometry.layers)  # Qwen3.5: in every layer
    assert ops[MOE] == blocks
    attention = geometry.layers.count(LayerKind.ATTENTION)
    assert engines(main) <= len(geometry.ssm_layers) + blocks + 2 * attention + 3


def test_segments_end_at_the_attention_and_hold_it_alone(traced: Traced) -> None:
    """Only a network whose inputs are the queries holds an attention: otherwise the compiler copies the cache."""
    for segment in traced.segments.values():
        names = {spec.name for spec in segment.inputs}
        caches = {name for name in names if is_cache(name)}
        if caches:
            assert len(caches) == 2 and len(names) == 7, names  # q, k, v, keys, values, position, positions
            kinds = {segment.network.definition.get_layer(i).type.name for i in
                     range(segment.network.definition.num_layers)}  # fmt: skip
            assert "MATRIX_MULTIPLY" not in kinds and "ATTENTION_INPUT" in kinds
