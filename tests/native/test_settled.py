"""Launches that promise settled states: bit for bit what plain launches give.

A chain of launches, captured in one graph, over disjoint slots; each takes the output of the one before as its values,
so a kernel that read its inputs before the wait, or wrote before it, would show.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.twin import Twin
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

LINKS = 8  # launches of a chain: more than may overlap
WINDOW, WIDE_WINDOW = 4, 8
SETTLED = _abi.UPDATE_PROGRAMMATIC_LAUNCH | _abi.UPDATE_SETTLED_STATE
KERNELS = [
    pytest.param(SsmKind.MAMBA2, 64, id="mamba2-64"),
    pytest.param(SsmKind.MAMBA2, 80, id="mamba2-80"),
    pytest.param(SsmKind.GDN, 128, id="gdn-128"),
]


@pytest.fixture(scope="module")
def library() -> _abi.Library:
    return _abi.Library(harness.LIBRARY)


class Chain:
    """The links' inputs and outputs; `values[i + 1]` is what link i writes. Of several tokens: one row is padding, one
    has fewer.
    """

    def __init__(self, twin: Twin, rows: int, tokens: int = 1) -> None:
        import torch

        counts = [tokens] * (rows - 1) + [max(tokens - 1, 1)]
        slots = [[link * rows + row for row in range(rows)] for link in range(LINKS)]
        for own in slots if tokens > 1 else ():
            own[1] = -1
        self.rows = [twin.make_rows(own, counts, tokens) for own in slots]
        self.first = self.rows[0]["value"].clone()
        self.values = [torch.full_like(self.first, float("nan")) for _ in range(LINKS + 1)]
        for row, value in zip(self.rows, self.values, strict=False):
            row["value"] = value

    def reset(self) -> None:
        for value in self.values:
            value.fill_(float("nan"))
        self.values[0].copy_(self.first)

    def replay(self, launch: Any) -> None:
        import torch

        self.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for link in range(LINKS):
                launch(self.rows[link], self.values[link + 1])
        graph.replay()
        torch.cuda.synchronize()

    def bits(self) -> Any:
        import torch

        return torch.stack([value.view(torch.int16) for value in self.values])


@pytest.mark.parametrize("tokens_before", [0, 1, WINDOW], ids=["empty", "read", "flush"])
@pytest.mark.parametrize("rows", [1, 40, 60, 180])
@pytest.mark.parametrize(("kind", "head_dim"), KERNELS)
def test_settled_updates_give_the_bits_of_plain_ones(
    library: _abi.Library, kind: SsmKind, head_dim: int, rows: int, tokens_before: int
) -> None:
    """8 heads: these rows take all launch choices on a GPU of 132 multiprocessors."""
    shape = ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128)
    twin = Twin(library, shape, ReplayConfig(window=WINDOW), "bfloat16", slots=rows * LINKS)
    compare(twin, rows, 1, tokens_before)


@pytest.mark.parametrize("records", [0, WIDE_WINDOW], ids=["read", "flush"])
@pytest.mark.parametrize("rows", [3, 90])
@pytest.mark.parametrize("tokens", [4, WIDE_WINDOW])
@pytest.mark.parametrize(("kind", "head_dim"), KERNELS)
def test_settled_verifications_give_the_bits_of_plain_ones(
    library: _abi.Library, kind: SsmKind, head_dim: int, tokens: int, rows: int, records: int
) -> None:
    """A CTA for each head, or persistent ones; a padding row and one of fewer tokens."""
    shape = ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128)
    replay = ReplayConfig(window=WIDE_WINDOW, max_step_tokens=tokens)
    compare(Twin(library, shape, replay, "bfloat16", slots=rows * LINKS), rows, tokens, records // tokens)


def compare(twin: Twin, rows: int, tokens: int, steps_before: int) -> None:
    """A chain behind that many steps, as plain launches and as settled ones: outputs and pool, bit for bit."""
    import torch

    window, slots = twin.pool.config.window, rows * LINKS
    twin.pool.tensors["checkpoint"].normal_()
    twin.pool.tensors["origin"].copy_(torch.arange(slots) % (window + 1))
    for _ in range(steps_before):
        given = twin.make_rows(list(range(slots)), [tokens] * slots, tokens)
        twin.pool.update(given, torch.empty_like(given["value"]))
        twin.pool.commit(given["slot"], given["num_tokens"], given["num_tokens"])
    saved = {name: tensor.clone() for name, tensor in twin.pool.tensors.items()}
    chain = Chain(twin, rows, tokens)
    results = []
    for flags in (0, SETTLED):
        for name, tensor in saved.items():
            twin.pool.tensors[name].copy_(tensor)
        torch.cuda.synchronize()
        chain.replay(lambda given, out, flags=flags: twin.pool.update(given, out, flags))
        state = {name: tensor.view(torch.uint8).clone() for name, tensor in twin.pool.tensors.items()}
        results.append((chain.bits(), state))
    (expected, expected_state), (got, got_state) = results
    assert torch.equal(got, expected)
    assert [name for name in got_state if not torch.equal(got_state[name], expected_state[name])] == []
    assert torch.isfinite(chain.values[LINKS].float()).all()
    flushed = bool((saved["checkpoint"] != twin.pool.tensors["checkpoint"]).any())
    assert flushed == (steps_before * tokens + tokens > window)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("kind", "head_dim"), KERNELS)
def test_settled_conventional_steps_give_the_bits_of_plain_ones(
    library: _abi.Library, kind: SsmKind, head_dim: int, rows: int
) -> None:
    import torch

    shape = ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128)
    twin = Twin(library, shape, ReplayConfig(window=WINDOW), "bfloat16", slots=rows * LINKS)
    chain = Chain(twin, rows)
    generator = torch.Generator("cuda").manual_seed(5)
    states = torch.randn(rows * LINKS, 1, 8, head_dim * 128, device="cuda", generator=generator)
    state = states.clone()
    code = _abi.Kind.MAMBA2 if kind is SsmKind.MAMBA2 else _abi.Kind.GDN

    def step(given: dict[str, Any], out: Any, flags: int) -> None:
        views = {name: harness.view(tensor) for name, tensor in given.items()}
        args = _abi.ConventionalArgs(
            kind=int(code), flags=flags, out=harness.view(out), state=harness.view(state), **views
        )
        library.conventional_update(args, int(torch.cuda.current_stream().cuda_stream))

    results = []
    for flags in (0, _abi.CONVENTIONAL_PROGRAMMATIC_LAUNCH | _abi.CONVENTIONAL_SETTLED_STATE):
        state.copy_(states)
        torch.cuda.synchronize()
        chain.replay(lambda given, out, flags=flags: step(given, out, flags))
        results.append((chain.bits(), state.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert bool((results[0][1] != states).any())
