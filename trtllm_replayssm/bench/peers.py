"""Kernels of other projects on the same shapes, timed the same way, where their package is installed.

An adapter imports the installed package only when it is asked to run; one that cannot be imported, or that refuses a
shape, says why and is left out. Inputs are random: these rows are times, not checks of somebody else's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.problem import COLD_BYTES
from trtllm_replayssm.bench.timing import time_cases
from trtllm_replayssm.shapes import SsmKind

_LEAST_LAUNCHES = 4
Step = Callable[[Tensor], None]  # one launch over the slots it is given


@dataclass(frozen=True, slots=True)
class Peer:
    """A kernel of a package. variants: launch choices to try; the fastest counts.

    make: for a case, the states [S, H, P, N] float32 and a variant, a function that enqueues one conventional step.
    """

    name: str
    kind: SsmKind
    variants: tuple[Any, ...]
    make: Callable[[KernelCase, Tensor, Any], Step]


def run_peers(cases: Sequence[KernelCase], bandwidth: float, *, rounds: int) -> Iterator[dict[str, Any]]:
    """One row per peer and conventional standard step of the list: the time of its fastest variant, or the reason."""
    for case in cases:
        if case.operation is not Operation.CONVENTIONAL or case.tokens != 1:
            continue
        for peer in PEERS:
            if peer.kind is case.shape.kind:
                yield _run(peer, case, bandwidth, rounds)
                torch.cuda.empty_cache()


def _run(peer: Peer, case: KernelCase, bandwidth: float, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"peer": peer.name, "what": case.operation.value, "shape": case.shape_name, "B": case.rows}
    shape, state_bytes = case.shape, 4 * case.shape.heads * case.shape.head_dim * case.shape.state_dim
    rotations = max(1, -(-COLD_BYTES // (case.rows * state_bytes)))
    total = case.rows * rotations
    states = torch.rand((total + 1, shape.heads, shape.head_dim, shape.state_dim), device="cuda") - 0.5
    order = torch.randperm(case.rows, device="cuda").int() + 1  # slot 0 stands for padding in some of them
    slots = [order + rotation * case.rows for rotation in range(rotations)]
    launches = rotations * -(-_LEAST_LAUNCHES // rotations)
    timed = []
    try:
        for variant in peer.variants:
            step = peer.make(case, states, variant)
            step(slots[0])

            def enqueue(step: Step = step) -> None:
                for launch in range(launches):
                    step(slots[launch % rotations])

            timed.append((enqueue, launches))
        torch.cuda.synchronize()
        times = time_cases(timed, rounds)
    except Exception as error:  # any package may fail in its own way; the others still run
        return {**row, "reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    best = min(range(len(times)), key=lambda i: times[i].median)
    floor, timing = case.floor_bytes(0) / bandwidth * 1e6, times[best]
    return {
        **row, "T": 1, "L": 0, "recurrence": case.recurrence.value, "read": None, "accepted": 1, "programmatic": False,
        "settled": False,         "variant": str(peer.variants[best]), "us": round(timing.median, 3),
        "us_quartiles": [round(timing.low, 3), round(timing.high, 3)],
        "GBs": round(case.floor_bytes(0) / timing.median * 1e-3, 1), "floor_us": round(floor, 2),
        "percent_of_floor": round(100 * floor / timing.median, 1),
    }  # fmt: skip


def _mamba_inputs(case: KernelCase) -> dict[str, Tensor]:
    shape, rows = case.shape, case.rows

    def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device="cuda").to(dtype)

    wide = (shape.heads, shape.head_dim)
    return {
        "x": random(rows, *wide),
        "dt": random(rows, shape.heads)[:, :, None].expand(rows, *wide),
        "A": (-torch.rand(shape.heads, device="cuda") * 15 - 1)[:, None, None].expand(*wide, shape.state_dim),
        "B": random(rows, shape.groups, shape.state_dim),
        "C": random(rows, shape.groups, shape.state_dim),
        "D": random(shape.heads)[:, None].expand(wide),
        "dt_bias": random(shape.heads)[:, None].expand(wide),
        "out": random(rows, *wide),
    }


def _vllm_mamba(case: KernelCase, states: Tensor, variant: Any) -> Step:
    from vllm.model_executor.layers.mamba.ops import mamba_ssm

    i = _mamba_inputs(case)

    def step(slots: Tensor) -> None:
        with mamba_ssm.override_ssm_config(variant):
            mamba_ssm.selective_state_update(
                states, i["x"], i["dt"], i["A"], i["B"], i["C"], i["D"], i["dt_bias"], dt_softplus=True,
                state_batch_indices=slots, out=i["out"],
            )  # fmt: skip

    return step


def _flashinfer_mamba(case: KernelCase, states: Tensor, variant: Any) -> Step:
    from flashinfer.mamba.selective_state_update import selective_state_update

    i = _mamba_inputs(case)

    def step(slots: Tensor) -> None:
        selective_state_update(
            states, i["x"], i["dt"], i["A"], i["B"], i["C"], i["D"], dt_bias=i["dt_bias"], dt_softplus=True,
            state_batch_indices=slots, pad_slot_id=0, out=i["out"], algorithm=variant,
        )  # fmt: skip

    return step


def _vllm_gdn(case: KernelCase, states: Tensor, variant: Any) -> Step:
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    shape, rows = case.shape, case.rows
    value_block, warps = variant
    heads, groups, dim = shape.heads, shape.groups, shape.state_dim
    mixed = torch.randn(rows, 2 * groups * dim + heads * shape.head_dim, device="cuda").bfloat16()
    a, b = (torch.randn(rows, heads, device="cuda").bfloat16() for _ in range(2))
    a_log, dt_bias = torch.rand(heads, device="cuda"), torch.randn(heads, device="cuda")
    out = torch.empty(rows, 1, heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    kernel = fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode_kernel

    def step(slots: Tensor) -> None:
        kernel[(-(-shape.head_dim // value_block), rows * heads)](
            mixed_qkv=mixed, a=a, b=b, A_log=a_log, dt_bias=dt_bias, o=out, h0=states, ht=states,
            ssm_state_indices=slots, scale=dim**-0.5, stride_mixed_qkv_tok=mixed.stride(0),
            stride_a_tok=a.stride(0), stride_b_tok=b.stride(0), stride_init_state_token=states.stride(0),
            stride_final_state_token=states.stride(0), stride_indices_seq=1, H=groups, HV=heads, K=dim,
            V=shape.head_dim, BK=dim, BV=value_block, SOFTPLUS_THRESHOLD=20.0, USE_QK_L2NORM_IN_KERNEL=True,
            SPLIT_BATCH_HEAD_GRID=False, num_warps=warps, num_stages=3,
        )  # fmt: skip

    return step


# Launch choices (block of d_v, warps) among which the fastest was always found on an H200.
_BLOCKS = ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4))
PEERS = (
    Peer("vllm", SsmKind.MAMBA2, _BLOCKS, _vllm_mamba),
    Peer("flashinfer", SsmKind.MAMBA2, ("simple", "vertical"), _flashinfer_mamba),
    Peer("vllm", SsmKind.GDN, _BLOCKS, _vllm_gdn),
)
