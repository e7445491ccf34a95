"""Every launch that `tune` may choose computes the same step: outputs and flushed states against float64, and the same
bits wherever only the dealing of the work differs. Needs a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.native import harness
from tests.native.test_session import MODELS, greedy, open_session
from tests.paths import EXAMPLES
from trtllm_replayssm.bench.cases import KernelCase, kernel_cases
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.launches import LaunchPlan, TunedLaunch, UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

LAUNCHES = [
    UpdateLaunch(kernel=UpdateKernel.DIRECT),
    UpdateLaunch(kernel=UpdateKernel.STREAMED),
    UpdateLaunch(kernel=UpdateKernel.STREAMED, multiprocessors=7, piece_heads=1),
]
FORMATS = [StateFormat.FLOAT32, StateFormat.FLOAT16]


def case_of(shape: str, rows: int, tokens: int, recurrence: StateFormat) -> KernelCase:
    found = next(c for c in kernel_cases() if c.shape_name == shape and c.operation.value == "update")
    return replace(found, rows=rows, tokens=tokens, window=16, recurrence=recurrence, read=None)


def found_candidates(library: _abi.Library, case: KernelCase, most: int) -> list[Any]:
    import torch

    from trtllm_replayssm.bench.launch_candidates import candidates
    from trtllm_replayssm.bench.problem import Problem

    problem = Problem(case, library, cold=False)
    multiprocessors = int(torch.cuda.get_device_properties(0).multi_processor_count)

    def planner(launch: UpdateLaunch | None) -> LaunchPlan:
        problem.launch = launch
        return problem.plan(multiprocessors)

    return candidates(case, planner, multiprocessors, most)


@pytest.mark.parametrize("recurrence", FORMATS, ids=[f.value for f in FORMATS])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("shape", ["super120b", "qwen4b"])
def test_every_candidate_is_within_the_gate(
    library: _abi.Library, shape: str, rows: int, tokens: int, recurrence: StateFormat
) -> None:
    from trtllm_replayssm.bench.gate import run_gate

    case = case_of(shape, rows, tokens, recurrence)
    found = found_candidates(library, case, most=16)
    assert len(found) > 1, "there is a choice; of float16 states with two heads a group one of two stages, no more"
    red = [c.name for c in found if not run_gate(case, library, rows=(rows,), launch=c.launch).green]
    assert not red


@pytest.mark.parametrize("h", [5, 16], ids=["read", "flush"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("shape", ["super120b", "qwen4b"])
def test_how_heads_are_dealt_changes_no_bit(library: _abi.Library, shape: str, tokens: int, h: int) -> None:
    import torch

    from trtllm_replayssm.bench.problem import Problem

    case = case_of(shape, 64, tokens, StateFormat.FLOAT32)
    kept: list[tuple[str, list[torch.Tensor]]] = []
    for candidate in found_candidates(library, case, most=1000):
        if candidate.plan.kernel == UpdateKernel.STREAMED:
            problem = Problem(case, library, cold=False, launch=candidate.launch)  # the same content each time
            problem.set_pending(h)
            problem.run(0, h)
            torch.cuda.synchronize()
            assert problem.state is not None
            assert not problem._workspace.any(), "a launch leaves its counters at zero"
            kept.append((candidate.name, [problem.out, *problem.state.tensors()]))
    assert len(kept) > 5
    first = kept[0][1]
    different = [
        name for name, tensors in kept if not all(torch.equal(a, b) for a, b in zip(first, tensors, strict=True))
    ]
    assert not different


@pytest.mark.parametrize(("shape", "rows"), [("super120b", 64), ("nano4b", 100), ("qwen4b", 100), ("qwen4b", 1056)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_rows_that_flush_among_others_change_no_bit(
    library: _abi.Library, shape: str, rows: int, tokens: int
) -> None:
    """Each row is what it is where all rows flush, or none: in which order rows are worked on shows nowhere."""
    import torch

    from trtllm_replayssm.bench.problem import Problem

    case = case_of(shape, rows, tokens, StateFormat.FLOAT32)
    flushes = torch.rand(rows, generator=torch.Generator().manual_seed(rows)).lt(0.3).cuda()

    def run(pending: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        problem = Problem(case, library, cold=False, launch=UpdateLaunch(kernel=UpdateKernel.STREAMED))
        problem._pending[-1] = pending.int()
        problem.slots[0][[3, 40]] = -1
        problem.num_tokens[7] = 0
        problem.run(0, -1)
        assert problem.state is not None
        slots.append(problem.slots[0].long())
        return problem.out, list(problem.state.tensors())

    slots: list[torch.Tensor] = []
    mixed, mixed_state = run(torch.where(flushes, 16, 5))
    for whole, chosen in ((16, flushes), (5, ~flushes)):
        out, state = run(torch.full_like(flushes, whole, dtype=torch.int32))
        mine = chosen[slots[0]] & (slots[0] >= 0)
        assert torch.equal(mixed[mine], out[mine])
        assert all(torch.equal(a[chosen], b[chosen]) for a, b in zip(mixed_state, state, strict=True))
        del out, state
    assert not mixed[slots[0] < 0].any()


@pytest.mark.parametrize("model", MODELS)
def test_a_session_records_the_launch_of_each_batch(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of two rows are asked for, others are not; once recorded, no step asks again."""
    asked: list[tuple[int, list[int]]] = []
    update = _abi.Library.update

    def recorded(library: _abi.Library, args: _abi.UpdateArgs, *rest: Any) -> None:
        asked.append((args.value.shape[0], [getattr(args.launch, name) for name, _ in args.launch._fields_]))
        update(library, args, *rest)

    monkeypatch.setattr(_abi.Library, "update", recorded)
    texts = []
    for launch in (None, *LAUNCHES):
        tuned = () if launch is None else (TunedLaunch(rows=2, tokens=1, launch=launch),)
        session = open_session(EXAMPLES / model, "cuda", 1, debug=False, launches=tuned)
        asked.clear()
        session.warm_up()
        assert {rows for rows, _ in asked} >= {1, 2, 3}
        numbers = [0] * 6 if launch is None else launch.numbers
        assert all(found == (numbers if rows == 2 else [0] * 6) for rows, found in asked)
        asked.clear()
        texts.append(greedy(session))
        assert not asked
    assert texts[-1] == texts[-2], "the same kernel, its work dealt otherwise"
