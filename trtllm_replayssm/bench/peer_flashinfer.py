"""Kernels of the package flashinfer: Mamba-2's conventional step. Signatures as in FlashInfer 0.7.4."""

from __future__ import annotations

from typing import Any

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.peer import Batches, Peer, Step, mamba_inputs, slots_of, states_of
from trtllm_replayssm.shapes import SsmKind


def _mamba_step(case: KernelCase, batches: Batches, variant: Any) -> Step:
    from flashinfer.mamba.selective_state_update import selective_state_update

    i, states = mamba_inputs(case), states_of(case, slots_of(batches))

    def step(batch: int, _h: int) -> None:
        selective_state_update(
            states, i.x, i.dt, i.a, i.b, i.c, i.skip, dt_bias=i.dt_bias, dt_softplus=True,
            state_batch_indices=batches[batch], pad_slot_id=0, out=i.out, algorithm=variant,
        )  # fmt: skip

    return step


def _one(tokens: int) -> bool:
    return tokens == 1


PEERS = (
    Peer(
        "flashinfer", "flashinfer-python", SsmKind.MAMBA2, Operation.CONVENTIONAL, _one, ("simple", "vertical"),
        _mamba_step,
    ),
)  # fmt: skip
