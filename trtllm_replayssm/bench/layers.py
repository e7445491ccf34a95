"""Times what surrounds the recurrence of a decode step, at the sizes of the presets: attention over KV slots and its
inputs, norms, activations, matrix products. Each beside its byte floor and beside plain torch.

    python -m trtllm_replayssm.bench.layers --json FILE [--what attention,linear] [--rounds 5]

No time without a green gate: every attention and norm case is first compared with torch in the same process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.bench.machine import describe
from trtllm_replayssm.bench.timing import copy_bandwidth, time_cases
from trtllm_replayssm.errors import InvariantError
from trtllm_replayssm.models import model_of
from trtllm_replayssm.ops import native_layers
from trtllm_replayssm.ops.native_layers import Function, HeadNorms, Rotation
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.runtime.pools.kv_pool import KvLayer
from trtllm_replayssm.runtime.session.decode_attention import attend_caches
from trtllm_replayssm.runtime.session.joined_products import followers
from trtllm_replayssm.runtime.session.step_context import HostRow
from trtllm_replayssm.shapes import AttentionShape, ModelGeometry
from trtllm_replayssm.weights.presets import preset_geometry, preset_names
from trtllm_replayssm.whole_file import growing_file

_COLD_BYTES = 400 << 20  # of rotated buffers: more than the L2 cache
_MAX_SETS, _LAUNCHES = 24, 8
_DEVICE = torch.device("cuda")
_EPS = 1e-6
# batch, tokens, context
_ATTENTION = ((1, 1, 512), (1, 4, 512), (32, 1, 512), (256, 1, 512), (256, 4, 512), (1, 1, 16384), (1, 1, 131072),
              (16, 1, 8192))  # fmt: skip
_ROWS = (1, 256, 1024)
_PRODUCT_ROWS = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Case:
    """A launch over rotated buffers: run(i) uses set i of `sets`; torch: the same in plain torch, where it is timed."""

    fields: dict[str, Any]
    floor_bytes: int
    sets: int
    run: Callable[[int], object]
    plain: Callable[[int], object] | None = None


def _sets(size: int) -> int:
    return max(1, min(_MAX_SETS, _COLD_BYTES // max(size, 1)))


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=_DEVICE)


def _rows(batch: int, tokens: int, context: int, first_slot: int) -> dict[str, Tensor]:
    slots = torch.arange(first_slot, first_slot + batch, dtype=torch.int32, device=_DEVICE)
    return {
        "slot": slots, "start": torch.full_like(slots, context - tokens), "num_tokens": torch.full_like(slots, tokens)
    }  # fmt: skip


def _require_close(what: str, got: Tensor, expected: Tensor, limit: float) -> None:
    error = float((got.float() - expected.float()).abs().max())
    if not error <= limit:
        raise InvariantError("bench layers", what, expected=f"torch's result within {limit}", got=error)


def attention_cases(name: str, shape: AttentionShape) -> Iterator[Case]:
    """Attention alone; bytes: keys and values of the context, once a sequence."""
    for batch, tokens, context in _ATTENTION:
        size = batch * context * shape.kv_size * 2 * 2
        sets, depth = _sets(size), context + 8
        caches = {part: _draw(sets * batch, shape.kv_heads, depth, shape.head_dim) for part in ("keys", "values")}
        q = _draw(batch, tokens, shape.heads, shape.head_dim)
        rows = [_rows(batch, tokens, context, i * batch) for i in range(sets)]

        def run(i: int, rows: Any = rows, q: Tensor = q, caches: Any = caches) -> Tensor:
            return native_layers.attention(rows[i], q, caches)

        if batch <= 32:
            on_host = [HostRow(row, tokens, context - tokens, last_chunk=False) for row in range(batch)]
            expected = attend_caches(q, KvLayer(**caches), on_host)
            _require_close(f"{name} attention", run(0).flatten(-2), expected, 0.03)
        yield Case({"what": "attention", "model": name, "B": batch, "T": tokens, "context": context}, size, sets, run)


def input_cases(name: str, shape: AttentionShape) -> Iterator[Case]:
    """Head norms and rotation where the model has them, and the write into the slots; bytes: in and out once."""
    rotation = Rotation.table(1024, shape.rotary_dim, shape.rope_theta, _DEVICE) if shape.rotary_dim else None
    weight = torch.ones(shape.head_dim, device=_DEVICE)
    norms = HeadNorms(weight, weight, _EPS, unit_offset=True) if rotation else None
    for batch, tokens in ((1, 1), (256, 1), (256, 4)):
        size = 2 * batch * tokens * (shape.q_size + 2 * shape.kv_size) * 2
        sets = _sets(size)
        q = _draw(sets, batch, tokens, shape.heads, 2 * shape.head_dim)[..., : shape.head_dim]
        k = _draw(sets, batch, tokens, shape.kv_heads, shape.head_dim)
        caches = {part: _draw(batch, shape.kv_heads, 640, shape.head_dim) for part in ("keys", "values")}
        rows = _rows(batch, tokens, 512, 0)

        def run(i: int, q: Tensor = q, k: Tensor = k, rows: Any = rows, caches: Any = caches) -> Tensor:
            return native_layers.attention_inputs(rows, q[i], k[i], k[i], caches, norms=norms, rotation=rotation)

        yield Case({"what": "attention_inputs", "model": name, "B": batch, "T": tokens}, size, sets, run)


def norm_cases(name: str, geometry: ModelGeometry) -> Iterator[Case]:
    """A residual sum and its norm: read two, write two."""
    size, weight = geometry.hidden, torch.rand(geometry.hidden, device=_DEVICE)
    for rows in _ROWS:
        sets = _sets(4 * rows * size * 2)
        x, residual = _draw(sets, rows, 1, size), _draw(sets, rows, 1, size)
        total = torch.empty_like(x)

        def run(i: int, x: Tensor = x, residual: Tensor = residual, total: Tensor = total) -> Tensor:
            return native_layers.add_rms_norm(x[i], residual[i], total[i], weight, _EPS, unit_offset=False)

        def plain(i: int, x: Tensor = x, residual: Tensor = residual) -> Tensor:
            wide = (x[i] + residual[i]).float()
            return (wide * (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight).bfloat16()

        _require_close(f"{name} norm", run(0), plain(0), 0.05)
        yield Case({"what": "add_rms_norm", "model": name, "rows": rows, "D": size}, 8 * rows * size, sets, run, plain)


def activation_cases(name: str, geometry: ModelGeometry) -> Iterator[Case]:
    """SiLU of the gates times the others of one projection (Qwen3.5), squared ReLU (Nemotron-H)."""
    size, gated = geometry.mlp_intermediate, geometry.attention.rotary_dim > 0
    for rows in _ROWS if size else ():
        floor = (3 if gated else 2) * rows * size * 2
        sets = _sets(floor)
        x = _draw(sets, rows, 1, 2 * size if gated else size)

        def run(i: int, x: Tensor = x) -> Tensor:
            if gated:
                return native_layers.activation(Function.SILU, x[i, ..., :size], x[i, ..., size:])
            return native_layers.activation(Function.RELU2, x[i])

        def plain(i: int, x: Tensor = x) -> Tensor:
            if gated:
                return functional.silu(x[i, ..., :size]) * x[i, ..., size:]
            return functional.relu(x[i]).square()

        what = "silu_mul" if gated else "relu2"
        yield Case({"what": what, "model": name, "rows": rows, "D": size}, floor, sets, run, plain)


def product_shapes(geometry: ModelGeometry) -> dict[tuple[int, int], str]:
    """[out, in] of the dense matrices of a model, alone and joined, by the last words of a name that has them."""
    specs = model_of(geometry).parameters(geometry)
    dense = {s.name: s.shape for s in specs if s.role in (ParamRole.LINEAR, ParamRole.EMBEDDING)}
    found = {}
    for name, (out, width) in dense.items():
        words = ".".join(name.split(".")[-3:-1])
        found[out, width] = words
        others = [other for other in followers(name) if other in dense]
        if others:
            found[out + sum(dense[other][0] for other in others), width] = f"{words} and others"
    return found


def product_cases(name: str, geometry: ModelGeometry) -> Iterator[Case]:
    """x W^T by torch; bytes: the weights, inputs and outputs once."""
    for (out, width), words in product_shapes(geometry).items():
        sets = _sets(out * width * 2)
        weights = _draw(sets, out, width)
        for rows in _PRODUCT_ROWS:
            x = _draw(rows, width)

            def run(i: int, x: Tensor = x, weights: Tensor = weights) -> Tensor:
                return functional.linear(x, weights[i])

            fields = {"what": "linear", "model": name, "matrix": words, "rows": rows, "out": out, "in": width}
            yield Case(fields, (out * width + rows * (out + width)) * 2, sets, run)


def cases(kinds: Sequence[str]) -> Iterator[Case]:
    """Of all presets, one after another: their buffers are freed in between."""
    for name in preset_names():
        geometry = preset_geometry(name)
        if "attention" in kinds:
            yield from attention_cases(name, geometry.attention)
        if "inputs" in kinds:
            yield from input_cases(name, geometry.attention)
        if "norm" in kinds:
            yield from norm_cases(name, geometry)
        if "activation" in kinds:
            yield from activation_cases(name, geometry)
        if "linear" in kinds:
            yield from product_cases(name, geometry)


def measure(case: Case, rounds: int, bandwidth: float) -> dict[str, Any]:
    """Median and quartiles in microseconds, and the share of the byte floor at the copy bandwidth of the run."""
    repeats = -(-_LAUNCHES // case.sets)

    def enqueue(run: Callable[[int], object]) -> Callable[[], None]:
        def launches() -> None:
            for _ in range(repeats):
                for i in range(case.sets):
                    run(i)

        return launches

    timed = [enqueue(run) for run in (case.run, case.plain) if run is not None]
    found = time_cases([(launches, repeats * case.sets) for launches in timed], rounds)
    floor = case.floor_bytes / bandwidth * 1e6
    result = {
        **case.fields, "us": round(found[0].median, 2),
        "us_quartiles": [round(found[0].low, 2), round(found[0].high, 2)],
        "floor_us": round(floor, 2), "percent_of_floor": round(100 * floor / found[0].median, 1),
    }  # fmt: skip
    return result if len(found) == 1 else {**result, "torch_us": round(found[1].median, 2)}


def main() -> None:
    """Command line; one JSON object a line."""
    kinds = ("attention", "inputs", "norm", "activation", "linear")
    parser = argparse.ArgumentParser(description="Measurements of what surrounds the recurrence.")
    parser.add_argument("--json", type=Path, required=True, help="file of JSON lines to write")
    parser.add_argument("--what", default=",".join(kinds), help=f"of {', '.join(kinds)}")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    machine, bandwidth = describe(), copy_bandwidth()
    with growing_file(arguments.json) as file:
        for case in cases(arguments.what.split(",")):
            result = {**measure(case, arguments.rounds, bandwidth), "copy_TBs": round(bandwidth * 1e-12, 3), **machine}
            file.write(json.dumps(result) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
