"""Times the routed experts of one layer at the public sizes, and the routing before them; prints JSON.

    python -m trtllm_replayssm.bench.experts [--tokens 1,32,256,1024] [--formats nvfp4,fp8,bf16] [--shapes super,122b]

floor_us: the bytes of the weights of experts that have tokens, over the copy bandwidth of the same run. gemm_us:
bfloat16 matrix products of the same sizes by torch, all tokens with one expert. Correctness is the tests' business
(tests/native).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench.machine import describe
from trtllm_replayssm.bench.timing import copy_bandwidth, time_cases
from trtllm_replayssm.ops import native_experts
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.ops.native_experts import ExpertStacks, PackedStack
from trtllm_replayssm.shapes import MoeShape, Router

GROUP_ROWS, BLOCK_COLUMNS, FP4_BLOCK = 128, 128, 16
ROUNDS = 9
LAUNCHES = 4  # of a captured graph; one layer's weights are many times the L2


@dataclass(frozen=True)
class ExpertsCase:
    """A layer: width of the experts' tokens and the routing."""

    name: str
    width: int
    shape: MoeShape


def _shape(experts: int, top_k: int, intermediate: int, router: Router, *, gated: bool) -> MoeShape:
    return MoeShape(
        experts=experts, top_k=top_k, intermediate=intermediate, latent=None, shared_intermediate=intermediate,
        gated=gated, shared_gated=False, router=router,
    )  # fmt: skip


CASES = (
    ExpertsCase("super", 1024, _shape(512, 22, 2688, Router.SIGMOID_BIAS, gated=False)),
    ExpertsCase("122b", 3072, _shape(256, 8, 1024, Router.SOFTMAX, gated=True)),
)
FORMATS = {"nvfp4": torch.uint8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}


def random_stack(kind: str, experts: int, rows: int, parts: int, columns: int) -> PackedStack:
    """Random elements of any of the formats, as packed matrices have them, of a size that keeps products small."""
    shape = (experts, -(-rows * parts // GROUP_ROWS), -(-columns // BLOCK_COLUMNS), GROUP_ROWS * BLOCK_COLUMNS)
    scale = None
    if kind == "nvfp4":
        data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device="cuda")
        codes = torch.randint(
            0x30, 0x40, (*shape[:-1], GROUP_ROWS * BLOCK_COLUMNS // FP4_BLOCK), dtype=torch.uint8, device="cuda"
        )
        scale = codes.view(torch.float8_e4m3fn)
    else:
        data = torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(FORMATS[kind])
    factor = torch.full((experts, parts, 1), 0.3 * columns**-0.5, device="cuda")
    return PackedStack(rows=rows, columns=columns, parts=parts, data=data, block_scale=scale, factor=factor)


def stacks_of(case: ExpertsCase, kind: str) -> ExpertStacks:
    """A layer's experts in one format."""
    shape = case.shape
    return ExpertStacks(
        up=random_stack(kind, shape.experts, shape.intermediate, 1 + shape.gated, case.width),
        down=random_stack(kind, shape.experts, case.width, 1, shape.intermediate),
    )


@dataclass(frozen=True)
class Step:
    """Inputs of one step; the routing is uniform."""

    x: Tensor
    logits: Tensor
    rows: StepRows
    ids: Tensor
    weights: Tensor

    @staticmethod
    def draw(case: ExpertsCase, tokens: int) -> Step:
        """Random tokens and logits, routed."""
        generator = torch.Generator("cuda").manual_seed(tokens)
        x = torch.randn((tokens, case.width), dtype=torch.bfloat16, device="cuda", generator=generator)
        logits = torch.randn((tokens, 1, case.shape.experts), device="cuda", generator=generator)
        ones = torch.ones(tokens, dtype=torch.int32, device="cuda")
        rows = StepRows(slot=torch.arange(tokens, dtype=torch.int32, device="cuda"), num_tokens=ones)
        return Step(x, logits, rows, *native_experts.route(logits, None, case.shape, rows))


def gemm_us(case: ExpertsCase, tokens: int) -> float:
    """bfloat16 products of all (token, choice) pairs with one expert's sizes: microseconds, by torch."""
    pairs, shape = tokens * case.shape.top_k, case.shape
    first = torch.randn((shape.intermediate * (1 + shape.gated), case.width), dtype=torch.bfloat16, device="cuda")
    second = torch.randn((case.width, shape.intermediate), dtype=torch.bfloat16, device="cuda")
    x = torch.randn((pairs, case.width), dtype=torch.bfloat16, device="cuda")
    inner = torch.randn((pairs, shape.intermediate), dtype=torch.bfloat16, device="cuda")

    def both() -> None:
        torch.nn.functional.linear(x, first)
        torch.nn.functional.linear(inner, second)

    return time_cases([(both, 1)], ROUNDS)[0].median


def measure(case: ExpertsCase, kind: str, stacks: ExpertStacks, tokens: int, bandwidth: float) -> dict[str, Any]:
    """One row: the experts, and the routing alone."""
    step = Step.draw(case, tokens)

    def experts() -> None:
        for _ in range(LAUNCHES):
            native_experts.experts(step.x, step.ids, step.weights, stacks)

    def routing() -> None:
        for _ in range(LAUNCHES):
            native_experts.route(step.logits, None, case.shape, step.rows)

    timing, route = time_cases([(experts, LAUNCHES), (routing, LAUNCHES)], ROUNDS)
    active = len(step.ids.unique())
    floor = (stacks.up.nbytes + stacks.down.nbytes) * active / case.shape.experts / bandwidth * 1e6
    gemm = gemm_us(case, tokens)
    return {
        "shape": case.name, "format": kind, "tokens": tokens, "active_experts": active,
        "us": round(timing.median, 2), "us_quartiles": [round(timing.low, 2), round(timing.high, 2)],
        "route_us": round(route.median, 2), "floor_us": round(floor, 2), "gemm_us": round(gemm, 2),
        "percent_of_floor": round(100 * floor / timing.median, 1),
        "percent_of_bound": round(100 * max(floor, gemm) / timing.median, 1),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the arguments name; JSON lines on standard output, the first says where."""
    parser = argparse.ArgumentParser(prog="bench.experts", description=__doc__)
    parser.add_argument("--tokens", default="1,32,256,1024")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--shapes", default=",".join(case.name for case in CASES))
    chosen = parser.parse_args(arguments)
    bandwidth = copy_bandwidth()
    emit({**describe(), "copy_TBs": round(bandwidth * 1e-12, 3)})
    for case in CASES:
        if case.name not in chosen.shapes.split(","):
            continue
        for kind in chosen.formats.split(","):
            stacks = stacks_of(case, kind)
            for tokens in chosen.tokens.split(","):
                emit(measure(case, kind, stacks, int(tokens), bandwidth))
            del stacks
            torch.cuda.empty_cache()


def emit(row: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
