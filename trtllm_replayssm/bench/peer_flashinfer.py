"""Kernels of the package flashinfer for Mamba-2: the conventional step, and replay of any number of tokens.

Signatures as in FlashInfer 0.7.4, which compiles its kernels when they are first used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.peer import (
    Batches,
    Peer,
    Step,
    mamba_inputs,
    one_token,
    random,
    same_everywhere,
    slots_of,
    states_of,
)
from trtllm_replayssm.shapes import SsmKind

# Of the replay: the kernel, parts of d_v, heads of a CTA of the first of two launches (0: the package's choice).
_REPLAY = (("monolith", 1, 0), ("monolith", 2, 0), ("two-kernel", 1, 0), ("two-kernel", 1, 8), ("two-kernel", 2, 8))


def _mamba_step(case: KernelCase, batches: Batches, variant: Any) -> Step:
    from flashinfer.mamba.selective_state_update import selective_state_update

    i, states = mamba_inputs(case), states_of(case, slots_of(batches))

    def step(batch: int, _h: int) -> None:
        selective_state_update(
            states, i.x, i.dt, i.a, i.b, i.c, i.skip, dt_bias=i.dt_bias, dt_softplus=True,
            state_batch_indices=batches[batch], pad_slot_id=0, out=i.out, algorithm=variant,
        )  # fmt: skip

    return step


def _mamba_replay(case: KernelCase, batches: Batches, variant: Any) -> Step:
    from flashinfer.mamba.checkpointing_ssu import allocate_checkpointing_ssu_scratch, checkpointing_ssu

    shape, slots, rows = case.shape, slots_of(batches), case.window + case.tokens
    i, states, (algorithm, parts, heads) = mamba_inputs(case), states_of(case, slots), variant

    def by_row(tensor: Tensor) -> Tensor:
        return tensor.view(case.rows, case.tokens, *tensor.shape[1:])

    x = random(slots, shape.heads, rows, shape.head_dim)
    b = random(slots, shape.groups, rows, shape.state_dim)
    dt = torch.rand((slots, shape.heads, rows), device="cuda") * 0.1
    scratch = allocate_checkpointing_ssu_scratch(
        case.rows, shape.heads, case.tokens, case.window, torch.bfloat16, torch.device("cuda")
    )
    start, cursors = same_everywhere(0, slots), {h: same_everywhere(h, slots) for h in range(case.window + 1)}

    def step(batch: int, h: int) -> None:
        checkpointing_ssu(
            states, x, b, dt, start, cursors[h], by_row(i.x), by_row(i.dt), i.a, by_row(i.b), by_row(i.c),
            by_row(i.out), D=i.skip, dt_bias=i.dt_bias, dt_softplus=True, state_batch_indices=batches[batch],
            pad_slot_id=0, d_split=parts, cb_scaled=scratch[0], cumAdt_vec=scratch[1], cb_old=scratch[2],
            precompute_heads_per_cta=heads, algorithm=algorithm,
        )  # fmt: skip

    return step


def _any(_tokens: int) -> bool:
    return True


_NAME, _PACKAGE, _MAMBA2 = "flashinfer", "flashinfer-python", SsmKind.MAMBA2
PEERS = (
    Peer(_NAME, _PACKAGE, _MAMBA2, Operation.CONVENTIONAL, one_token, ("simple", "vertical"), _mamba_step),
    Peer(_NAME, _PACKAGE, _MAMBA2, Operation.UPDATE, _any, _REPLAY, _mamba_replay),
)
