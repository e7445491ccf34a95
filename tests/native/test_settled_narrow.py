"""Launches that promise settled states, with narrow states: bit for bit what plain launches give.

A chain of launches in one graph over disjoint slots; each takes the output of the one before as its values, so a kernel
that read its inputs before the wait, or wrote before it, would show. Rows stand at different places in their windows:
some flush, one is padding, one has no token.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.native import harness
from trtllm_replayssm.bench.cases import KernelCase, Operation, kernel_shapes
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops import _abi

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

LINKS = 4
WINDOW = 16
FORMATS = [
    (StateFormat.FLOAT32, StateFormat.NVFP4),
    (StateFormat.FLOAT16, StateFormat.NVFP4),
    (StateFormat.FLOAT32, StateFormat.FP8),
    (StateFormat.FLOAT16, None),
]


@pytest.fixture(scope="module")
def library() -> _abi.Library:
    return _abi.Library(harness.LIBRARY)


def problem(
    library: _abi.Library, shape_name: str, rows: int, recurrence: StateFormat, read: StateFormat | None
) -> Any:
    from trtllm_replayssm.bench.problem import Problem

    case = KernelCase(
        shape_name=shape_name, shape=kernel_shapes()[shape_name], suite="settled", operation=Operation.UPDATE,
        rows=rows, tokens=1, window=WINDOW, recurrence=recurrence, read=read,
    )  # fmt: skip
    made = Problem(case, library)
    made.num_tokens[rows // 2] = 0
    for slots in made.slots:
        slots[rows // 3] = -1
    return made


def state_of(made: Any) -> dict[str, Any]:
    from trtllm_replayssm.ops.native import state_tensors

    return {name: tensor for name, tensor in state_tensors(made.state).items() if tensor is not None}


def chain(made: Any, first: Any, mode: Any) -> Any:
    """The links' outputs."""
    import torch

    values = [first.clone(), *(torch.full_like(first, float("nan")) for _ in range(LINKS))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for link in range(LINKS):
            made.inputs["value"], made.out = values[link], values[link + 1]
            made.run(link, WINDOW, mode)
    graph.replay()
    torch.cuda.synchronize()
    return torch.stack([value.view(torch.int16) for value in values])


@pytest.mark.parametrize("flushing", [False, True], ids=["reads", "some flush"])
@pytest.mark.parametrize("rows", [7, 60])
@pytest.mark.parametrize(
    ("recurrence", "read"), FORMATS, ids=[f"{a.value}-{b.value if b else 'one'}" for a, b in FORMATS]
)
@pytest.mark.parametrize("shape_name", ["nano4b", "super120b", "qwen4b"])
def test_settled_updates_give_the_bits_of_plain_ones(
    library: _abi.Library, shape_name: str, recurrence: StateFormat, read: StateFormat | None, rows: int, flushing: bool
) -> None:
    import torch

    from trtllm_replayssm.bench.problem import LaunchMode

    made = problem(library, shape_name, rows, recurrence, read)
    pending = made.cursors.h
    pending.copy_(torch.arange(pending.numel(), device=pending.device) * 5 % (WINDOW + flushing))
    made._committed(WINDOW).copy_(pending)  # what a launch of that depth reads
    saved = {name: tensor.clone() for name, tensor in state_of(made).items()}
    first = made.inputs["value"].clone()
    results = []
    for mode in (LaunchMode.PLAIN, LaunchMode.SETTLED):
        for name, tensor in state_of(made).items():
            tensor.copy_(saved[name])
        torch.cuda.synchronize()
        bits = chain(made, first, mode)
        results.append((bits, {name: tensor.view(torch.uint8).clone() for name, tensor in state_of(made).items()}))
    (expected, expected_state), (got, got_state) = results
    assert torch.equal(got, expected)
    assert [name for name in got_state if not torch.equal(got_state[name], expected_state[name])] == []
    changed = [name for name in saved if not torch.equal(saved[name].view(torch.uint8), got_state[name])]
    assert ("checkpoint" in changed) == flushing
