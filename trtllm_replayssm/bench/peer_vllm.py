"""Kernels of the package vllm: conventional steps and verifications of both recurrences, Mamba-2's plain replay.

Signatures as in vLLM 0.33.0: `model_executor/layers/mamba/ops` and `third_party/flash_linear_attention/ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.peer import (
    Batches,
    Peer,
    Step,
    gdn_inputs,
    mamba_inputs,
    many_tokens,
    one_token,
    random,
    same_everywhere,
    slots_of,
    states_of,
)  # fmt: skip
from trtllm_replayssm.shapes import SsmKind

# Launch choices (block of d_v, warps) among which the fastest was always found on an H200.
_BLOCKS = ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (32, 2), (32, 4), (64, 4))
_WIDE_BLOCKS = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 4), (128, 8))
# Of the replay: block of d_v, warps, tiles of d_k without and with a flush, stages. The first is the package's.
_REPLAY = ((16, 1, 64, 128, 2), (16, 1, 128, 128, 2), (16, 2, 128, 128, 2), (32, 1, 64, 128, 2), (8, 1, 128, 128, 2))


@contextmanager
def _mamba_blocks(variant: Any) -> Iterator[None]:
    from vllm.model_executor.layers.mamba.ops import mamba_ssm

    with mamba_ssm.override_ssm_config(variant):
        yield


@contextmanager
def _replay_blocks(variant: Any) -> Iterator[None]:
    from vllm.model_executor.layers.mamba.ops import replayssm_config

    with patch.dict(replayssm_config._overrides, mamba2_output_only=variant):
        yield


def _mamba_step(case: KernelCase, batches: Batches, _variant: Any) -> Step:
    from vllm.model_executor.layers.mamba.ops import mamba_ssm

    i, states = mamba_inputs(case), states_of(case, slots_of(batches))

    def step(batch: int, _h: int) -> None:
        mamba_ssm.selective_state_update(
            states, i.x, i.dt, i.a, i.b, i.c, i.skip, i.dt_bias, dt_softplus=True, state_batch_indices=batches[batch],
            out=i.out,
        )  # fmt: skip

    return step


def _token_slots(case: KernelCase, batches: Batches) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Of a verification with a state after each token: first tokens [B + 1], accepted [B], entries [B, T] by batch."""
    first = torch.arange(0, case.rows * case.tokens + 1, case.tokens, device="cuda", dtype=torch.int32)
    steps = torch.arange(case.tokens, device="cuda", dtype=torch.int32)
    entries = [(slots[:, None] * case.tokens + steps).contiguous() for slots in batches]
    return first, same_everywhere(case.tokens, case.rows), entries


def _mamba_snapshots(case: KernelCase, batches: Batches, _variant: Any) -> Step:
    from vllm.model_executor.layers.mamba.ops import mamba_ssm

    i, states = mamba_inputs(case), states_of(case, slots_of(batches) * case.tokens)
    first, accepted, entries = _token_slots(case, batches)

    def step(batch: int, _h: int) -> None:
        mamba_ssm.selective_state_update(
            states, i.x, i.dt, i.a, i.b, i.c, i.skip, i.dt_bias, dt_softplus=True,
            state_batch_indices=entries[batch], num_accepted_tokens=accepted, cu_seqlens=first, out=i.out,
        )  # fmt: skip

    return step


def _mamba_replay(case: KernelCase, batches: Batches, _variant: Any) -> Step:
    from vllm.model_executor.layers.mamba.ops import selective_state_update_replayssm_output_only as module

    shape, window = case.shape, case.window
    i, states = mamba_inputs(case), states_of(case, slots_of(batches))
    slots = slots_of(batches)
    x = random(slots, shape.heads, window, shape.head_dim)
    dt = torch.rand((slots, shape.heads, window), device="cuda") * 0.1
    b = random(slots, shape.groups, window, shape.state_dim)
    products = torch.empty(case.rows, shape.groups, window, device="cuda")
    # Its window holds the current token too: where ours has h records it has h - 1, and it folds at h = L.
    cursors = {h: same_everywhere(h - 1, case.rows) for h in range(1, window + 1)}
    flushes = {h: same_everywhere(h == window, case.rows, torch.bool) for h in cursors}

    def step(batch: int, h: int) -> None:
        module.selective_state_update_replayssm_output_only(
            states, i.x, i.dt, i.a, i.b, i.c, i.skip, i.dt_bias, dt_softplus=True, x_cache=x, dt_cache=dt, B_cache=b,
            bc_pre=products, write_pos=cursors[h], is_flush=flushes[h], max_cache_len=window,
            state_batch_indices=batches[batch], out=i.out,
        )  # fmt: skip

    return step


def _gdn_step(case: KernelCase, batches: Batches, variant: Any) -> Step:
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent

    shape, (block, warps) = case.shape, variant
    i, states = gdn_inputs(case), states_of(case, slots_of(batches))
    kernel = fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode_kernel

    def step(batch: int, _h: int) -> None:
        kernel[(-(-shape.head_dim // block), case.rows * shape.heads)](
            mixed_qkv=i.mixed, a=i.decay, b=i.beta, A_log=i.a_log, dt_bias=i.dt_bias, o=i.out, h0=states, ht=states,
            ssm_state_indices=batches[batch], scale=shape.state_dim**-0.5, stride_mixed_qkv_tok=i.mixed.stride(0),
            stride_a_tok=i.decay.stride(0), stride_b_tok=i.beta.stride(0), stride_init_state_token=states.stride(0),
            stride_final_state_token=states.stride(0), stride_indices_seq=1, H=shape.groups, HV=shape.heads,
            K=shape.state_dim, V=shape.head_dim, BK=shape.state_dim, BV=block, SOFTPLUS_THRESHOLD=20.0,
            USE_QK_L2NORM_IN_KERNEL=True, SPLIT_BATCH_HEAD_GRID=False, num_warps=warps, num_stages=3,
        )  # fmt: skip

    return step


def _gdn_snapshots(case: KernelCase, batches: Batches, variant: Any) -> Step:
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating

    shape, rows, (block, warps) = case.shape, case.rows, variant
    i, states = gdn_inputs(case), states_of(case, slots_of(batches) * case.tokens)
    first, accepted, entries = _token_slots(case, batches)
    keys = shape.groups * shape.state_dim
    q, k, v = (part.contiguous() for part in i.mixed.split((keys, keys, shape.heads * shape.head_dim), 1))
    kernel = fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update_kernel

    def step(batch: int, _h: int) -> None:
        of_rows = entries[batch]
        kernel[(1, -(-shape.head_dim // block), rows * shape.heads)](
            A_log=i.a_log, a=i.decay, b=i.beta, dt_bias=i.dt_bias, beta=1.0, threshold=20.0, q=q, k=k, v=v, o=i.out,
            h0=states, ht=states, cu_seqlens=first, ssm_state_indices=of_rows, num_accepted_tokens=accepted,
            scale=shape.state_dim**-0.5, N=rows, T=rows * case.tokens, B=1, H=shape.groups, HV=shape.heads,
            K=shape.state_dim, V=shape.head_dim, BK=shape.state_dim, BV=block,
            stride_init_state_token=states.stride(0), stride_final_state_token=states.stride(0),
            stride_indices_seq=of_rows.stride(0), stride_indices_tok=of_rows.stride(1), INPLACE_FINAL_STATE=True,
            USE_QK_L2NORM_IN_KERNEL=True, IS_KDA=False, num_warps=warps, num_stages=3,
        )  # fmt: skip

    return step


_MAMBA2, _GDN = SsmKind.MAMBA2, SsmKind.GDN
PEERS = (
    Peer("vllm", "vllm", _MAMBA2, Operation.CONVENTIONAL, one_token, _BLOCKS, _mamba_step, _mamba_blocks),
    Peer("vllm", "vllm", _MAMBA2, Operation.CONVENTIONAL, many_tokens, _BLOCKS, _mamba_snapshots, _mamba_blocks),
    Peer("vllm", "vllm", _MAMBA2, Operation.UPDATE, one_token, _REPLAY, _mamba_replay, _replay_blocks),
    Peer("vllm", "vllm", _GDN, Operation.CONVENTIONAL, one_token, _BLOCKS, _gdn_step),
    Peer("vllm", "vllm", _GDN, Operation.CONVENTIONAL, many_tokens, _WIDE_BLOCKS, _gdn_snapshots),
)
