"""The native attention over KV slots and its inputs, against the same formulas in float64.

Bound (O3): twice what plain torch loses on the same problem at the activation type, and one rounding. Rows of padding,
tokens that do not exist and what the caches hold beyond a row's tokens (NaN here) must not show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.native import harness

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable())),
    pytest.mark.usefixtures("installed_library"),
]  # fmt: skip

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.bench.rounding import TYPES, step
    from trtllm_replayssm.ops import native_layers
    from trtllm_replayssm.ops.native_layers import HeadNorms, Rotation

EPS = 1e-6
NAN = float("nan")


def rounded(exact: Any, noise: Any, act: str) -> Any:
    """Half a step of the type at each value that the noise may lead to, and the noise."""
    return 0.5 * step(exact.abs() + noise, TYPES[getattr(torch, act)]) + noise


@dataclass(frozen=True)
class Shape:
    """tokens: T; lengths: start of each row; counts: its num_tokens; padding rows have slot -1."""

    heads: int
    kv_heads: int
    size: int
    tokens: int
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    padding: tuple[int, ...] = ()
    depth: int = 0


class Problem:
    """Caches of NaN but for the positions before each row's start, and the new tokens."""

    def __init__(self, shape: Shape, act: str = "bfloat16", *, kv_spread: float = 1.0) -> None:
        self.shape, self.act, dtype = shape, act, getattr(torch, act)
        generator = torch.Generator("cuda").manual_seed(shape.size + shape.tokens)
        rows = len(shape.starts)
        self.depth = shape.depth or max(shape.starts) + shape.tokens

        def draw(*sizes: int) -> Any:
            return torch.randn(sizes, generator=generator, device="cuda").to(dtype)

        self.q = draw(rows, shape.tokens, shape.heads, shape.size)
        self.k, self.v = (draw(rows, shape.tokens, shape.kv_heads, shape.size) * kv_spread for _ in range(2))
        slots = [-1 if row in shape.padding else rows - row for row in range(rows)]  # slot 0 is nobody's
        self.slots = slots
        sizes = (rows + 1, shape.kv_heads, self.depth, shape.size)
        self.caches = {name: torch.full(sizes, NAN, dtype=dtype, device="cuda") for name in ("keys", "values")}
        for row, start in enumerate(shape.starts):
            for cache in self.caches.values():
                if slots[row] >= 0:
                    cache[slots[row], :, :start] = draw(shape.kv_heads, start, shape.size) * kv_spread
            for tensor in (self.q, self.k, self.v):
                tensor[row, shape.counts[row] :] = NAN
                if slots[row] < 0:
                    tensor[row] = NAN
        ints = {"slot": slots, "start": shape.starts, "num_tokens": shape.counts}
        self.rows = {name: torch.tensor(values, dtype=torch.int32, device="cuda") for name, values in ints.items()}

    def run(self, norms: Any = None, rotation: Any = None) -> tuple[Any, Any]:
        before = {name: cache.clone() for name, cache in self.caches.items()}
        q = native_layers.attention_inputs(
            self.rows, self.q, self.k, self.v, self.caches, norms=norms, rotation=rotation
        )
        return native_layers.attention(self.rows, q, self.caches), before

    def exists(self, row: int) -> int:
        return 0 if self.slots[row] < 0 else self.shape.counts[row]

    def expected(self, row: int, q: Any, wide: Any) -> Any:
        """[n, Hq, D] of a row from its queries and the caches as they are now, in the type `wide`."""
        n, start, slot = self.exists(row), self.shape.starts[row], self.slots[row]
        group = self.shape.heads // self.shape.kv_heads
        keys, values = (
            self.caches[name][slot, :, : start + n].to(wide).repeat_interleave(group, 0) for name in ("keys", "values")
        )
        scores = q[row, :n].to(wide).transpose(0, 1) @ keys.transpose(1, 2) * self.shape.size**-0.5
        seen = torch.arange(start + n, device="cuda") <= torch.arange(start, start + n, device="cuda")[:, None]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ values).transpose(0, 1)

    def check(self, out: Any) -> None:
        for row in range(len(self.slots)):
            n = self.exists(row)
            assert (out[row, n:] == 0).all(), f"row {row}"
            if n == 0:
                continue
            exact = self.expected(row, self.q, torch.float64)
            plain = self.expected(row, self.q, self.q.dtype).double()
            error = (out[row, :n].double() - exact).abs()
            bound = rounded(exact, 2 * (plain - exact).abs().max(), self.act)
            assert (error <= bound).all(), f"row {row}: {error.max()} beyond {bound.max()}"


SHAPES = {
    "nano": Shape(40, 8, 128, 1, (0, 511, 63, 64, 300), (1, 1, 1, 1, 1), padding=(2,)),
    "nano-verify": Shape(40, 8, 128, 4, (0, 511, 61, 64, 300), (4, 3, 1, 0, 4), padding=(4,)),
    "nano-wide": Shape(40, 8, 128, 8, (17, 511), (8, 5)),
    "super": Shape(32, 2, 128, 1, (700, 1, 15), (1, 1, 1)),
    "super-verify": Shape(32, 2, 128, 6, (700, 1, 15), (6, 2, 5)),
    "qwen": Shape(16, 4, 256, 1, (700, 0, 16), (1, 1, 1)),
    "qwen-verify": Shape(16, 4, 256, 4, (700, 0, 16), (4, 4, 1)),
    "qwen-large-verify": Shape(32, 2, 256, 8, (130, 700), (7, 8)),
    "qwen-large-pair": Shape(32, 2, 256, 2, (130, 0, 47), (2, 2, 1)),
    "qwen-large-full": Shape(32, 2, 256, 4, tuple(range(100, 300)), (4,) * 200, padding=(3,)),
    "super-full": Shape(32, 2, 128, 4, tuple(range(0, 300)), (4,) * 300),
    "nano-full": Shape(40, 8, 128, 4, tuple(range(400, 500)), (4,) * 100),
    "uneven": Shape(40, 8, 128, 1, tuple(997 * row % 1201 for row in range(200)), (1,) * 200, padding=(7, 11)),
    "uneven-verify": Shape(32, 2, 256, 2, tuple(997 * row % 1201 for row in range(150)), (2,) * 150, padding=(7, 11)),
    "uneven-pairs": Shape(40, 8, 128, 3, tuple(571 * row % 701 for row in range(90)), (3, 2, 1) * 30, padding=(5,)),
    "many": Shape(4, 2, 64, 1, tuple(7 * row % 23 for row in range(1100)), (1,) * 1100),
    "small": Shape(4, 2, 24, 3, (5, 40, 0), (3, 0, 2)),
    "odd-head": Shape(6, 2, 192, 5, (33, 90), (5, 4)),
    "long": Shape(16, 4, 256, 2, (9000,), (2,)),
    "long-short": Shape(40, 8, 128, 1, (20000, 3), (1, 1)),
    "deep-cache": Shape(32, 2, 64, 1, (100,), (1,), depth=30000),
}


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_the_formula(name: str, act: str) -> None:
    problem = Problem(SHAPES[name], act)
    out, before = problem.run()
    problem.check(out)
    for kind, new in (("keys", problem.k), ("values", problem.v)):
        cache = before[kind]
        for row in range(len(problem.slots)):
            n, start, slot = problem.exists(row), SHAPES[name].starts[row], problem.slots[row]
            if n:
                cache[slot, :, start : start + n] = new[row, :n].transpose(0, 1)
        assert torch.equal(cache.view(torch.int16), problem.caches[kind].view(torch.int16)), "written elsewhere"


def test_sharp_scores_are_kept_apart() -> None:
    problem = Problem(SHAPES["qwen-verify"], kv_spread=12.0)
    problem.check(problem.run()[0])


@pytest.mark.parametrize(("slot", "start"), [(99, 0), (1, 700), (1, -5)])
def test_ids_and_positions_out_of_range_do_no_harm(slot: int, start: int) -> None:
    problem = Problem(SHAPES["super"])
    problem.rows["slot"][0] = slot
    problem.rows["start"][0] = start + problem.depth if start > 0 else start
    out, before = problem.run()
    assert (out[0] == 0).all()
    assert torch.equal(before["keys"][3].view(torch.int16), problem.caches["keys"][3].view(torch.int16))


def turned(x: Any, positions: Any, rotary: int, theta: float) -> Any:
    half = rotary // 2
    frequency = theta ** (torch.arange(half, device="cuda").double() * (-2.0 / rotary))
    angle = positions.double()[..., None, None] * frequency
    first, second = x[..., :half], x[..., half:rotary]
    parts = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin(), x[..., rotary:]]
    return torch.cat(parts, -1)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("size", "rotary"), [(256, 64), (256, 0), (128, 128), (64, 16)])
@pytest.mark.parametrize("start", [100_000, 90])  # the second: little memory, for calls that are recorded
def test_heads_are_normalised_turned_and_written(start: int, size: int, rotary: int, tokens: int, act: str) -> None:
    shape = Shape(8, 2, size, tokens, (start, 0, 7), (tokens, 0, min(tokens, 2)))
    problem = Problem(shape, act)
    q_weight, k_weight = (torch.rand(size, device="cuda") for _ in range(2))
    wide = torch.cat([problem.q, torch.full_like(problem.q, NAN)], -1)  # as a projection with the gates between
    problem.q = wide[..., :size]
    rotation = Rotation.table(problem.depth, rotary, 1e7, torch.device("cuda")) if rotary else None
    q = native_layers.attention_inputs(
        problem.rows, problem.q, problem.k, problem.v, problem.caches,
        norms=HeadNorms(q_weight, k_weight, EPS, unit_offset=True), rotation=rotation,
    )  # fmt: skip

    def prepared(x: Any, weight: Any, positions: Any) -> Any:
        normalised = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * (1.0 + weight.double())
        return turned(normalised, positions, rotary, 1e7) if rotary else normalised

    for row in (0, 2):
        n, start, slot = shape.counts[row], shape.starts[row], problem.slots[row]
        positions = torch.arange(start, start + n, device="cuda")
        stored = {name: cache[slot, :, start : start + n].transpose(0, 1) for name, cache in problem.caches.items()}
        for got, x, weight in ((q[row, :n], problem.q, q_weight), (stored["keys"], problem.k, k_weight)):
            expected = prepared(x[row, :n], weight, positions)
            # the table's float32 angles and a few float32 steps, of numbers up to the head's largest
            slack = rounded(expected, 1e-6 * expected.abs().max(), act)
            assert ((got.double() - expected).abs() <= slack).all()
        assert torch.equal(stored["values"], problem.v[row, :n])


def test_a_captured_step_follows_its_rows() -> None:
    problem = Problem(SHAPES["nano-verify"])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = problem.run()
    for starts in ((0, 511, 61, 64, 300), (0, 100, 2, 64, 300)):
        problem.rows["start"].copy_(torch.tensor(starts))
        graph.replay()
        again, _ = problem.run()
        assert torch.equal(captured, again)


def test_a_row_has_the_same_bits_in_batches_whose_keys_are_cut_alike() -> None:
    problem = Problem(Shape(40, 8, 128, 2, (700,) * 80, (2,) * 80))
    many, _ = problem.run()
    few = {name: values[10:70].clone() for name, values in problem.rows.items()}
    q = native_layers.attention_inputs(
        few, *(t[10:70] for t in (problem.q, problem.k, problem.v)), problem.caches, norms=None, rotation=None
    )
    assert torch.equal(native_layers.attention(few, q, problem.caches), many[10:70])


@pytest.mark.parametrize("name", ["uneven", "uneven-verify", "uneven-pairs"])
def test_a_row_has_the_same_bits_wherever_it_is_dealt(name: str) -> None:
    """Blocks take rows by length: turned round, a batch of uneven ones gives the same bits turned round."""
    problem = Problem(SHAPES[name])
    forward, _ = problem.run()
    turned_rows = {name: values.flip(0).contiguous() for name, values in problem.rows.items()}
    q = native_layers.attention_inputs(
        turned_rows, *(t.flip(0) for t in (problem.q, problem.k, problem.v)), problem.caches, norms=None, rotation=None
    )
    assert torch.equal(native_layers.attention(turned_rows, q, problem.caches).flip(0), forward)
