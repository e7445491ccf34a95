"""Kernels of the method's research fork of vllm: GDN's plain replay, both recurrences' speculative replay.

Signatures as in Johnny-Liou/ReplaySSM at a84849410, which installs as `vllm`. Its commit kernel is not part of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

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

# Block of d_v, warps, stages, tiles of d_k; the first is the package's, also below.
_GDN_DECODE = ((64, 1, 3, 2), (32, 1, 3, 2), (64, 2, 3, 2), (128, 2, 3, 4))
_GDN_SPEC = (None, (64, 2, 2, 2), (32, 1, 2, 2), (64, 1, 4, 2))
_MAMBA_SPEC = (None, (32, 1, 128, 2), (32, 2, 128, 2), (64, 4, 64, 2))


@contextmanager
def _blocks(variant: Any, *kernels: str) -> Iterator[None]:
    from vllm.model_executor.layers.mamba.ops import replayssm_config

    with ExitStack() as stack:
        for kernel in kernels if variant is not None else ():
            stack.enter_context(replayssm_config.override_replayssm_config(kernel, variant))
        yield


def _gdn_decode_blocks(variant: Any) -> Any:
    return _blocks(variant, "gdn_decode")


def _gdn_spec_blocks(variant: Any) -> Any:
    return _blocks(variant, "gdn_spec_verify", "gdn_spec_flush")


def _mamba_spec_blocks(variant: Any) -> Any:
    return _blocks(variant, "mamba2_spec_verify", "mamba2_spec_flush")


def _gdn_decode(case: KernelCase, batches: Batches, _variant: Any) -> Step:
    from vllm.model_executor.layers.fla.ops import fused_recurrent_replayssm as module

    shape, window, slots = case.shape, case.window, slots_of(batches)
    i, states = gdn_inputs(case), states_of(case, slots)
    d = random(slots, shape.heads, window, shape.head_dim)
    k = random(slots, shape.groups, window, shape.state_dim)
    g = -torch.rand((slots, shape.heads, window), device="cuda") * 0.1
    out = i.out.view(case.rows, 1, shape.heads, shape.head_dim)
    # Its window holds the current token too: where ours has h records it has h - 1, and it folds at h = L.
    cursors = {h: same_everywhere(h - 1, case.rows) for h in range(1, window + 1)}

    def step(batch: int, h: int) -> None:
        module.fused_recurrent_gated_delta_rule_replayssm(
            i.mixed, i.decay, i.beta, i.a_log, i.dt_bias, shape.state_dim**-0.5, states, d, k, g, out, batches[batch],
            cursors[h], use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return step


def _ring(case: KernelCase) -> tuple[int, int]:
    """The bound at which the package folds, and rows of its rings."""
    bound = case.window + case.tokens
    return bound, 1 << (bound - 1).bit_length()


def _gdn_spec(case: KernelCase, batches: Batches, _variant: Any) -> Step:
    from vllm.model_executor.layers.fla.ops import gdn_replayssm_spec_decode as module

    shape, slots, (bound, rows) = case.shape, slots_of(batches), _ring(case)
    i, states = gdn_inputs(case), states_of(case, slots)
    d = random(slots, shape.heads, rows, shape.head_dim)
    k = random(slots, shape.groups, rows, shape.state_dim)
    g = -torch.rand((slots, shape.heads, rows), device="cuda") * 0.1
    first = torch.arange(0, case.rows * case.tokens + 1, case.tokens, device="cuda", dtype=torch.int32)
    cursors = {h: same_everywhere(h, slots) for h in range(case.window + 1)}
    flushes = {h: same_everywhere(h + case.tokens > case.window, slots, torch.int8) for h in cursors}
    base = same_everywhere(0, slots)

    def step(batch: int, h: int) -> None:
        module.gdn_replayssm_spec_decode(
            i.mixed, i.decay, i.beta, i.a_log, i.dt_bias, states, d, k, g, i.out, first, batches[batch], cursors[h],
            base, flushes[h], bound, case.tokens,
        )  # fmt: skip

    return step


def _mamba_spec(case: KernelCase, batches: Batches, _variant: Any) -> Step:
    from vllm.model_executor.layers.mamba.ops import selective_state_update_replayssm_spec as module

    shape, slots, (bound, rows) = case.shape, slots_of(batches), _ring(case)
    i, states = mamba_inputs(case), states_of(case, slots)
    inner, keys = shape.heads * shape.head_dim, shape.groups * shape.state_dim
    tokens = case.rows * case.tokens
    convolved = random(tokens, inner + 2 * keys)
    dt = i.dt[:, :, 0].float().contiguous()
    records = random(slots, rows, inner + keys)
    record_dt = torch.rand((slots, shape.heads, rows), device="cuda") * 0.1 - 4
    products = random(case.rows, shape.groups, rows, 1 << (case.tokens - 1).bit_length())
    first = torch.arange(0, tokens + 1, case.tokens, device="cuda", dtype=torch.int32)
    cursors = {h: same_everywhere(h, slots) for h in range(case.window + 1)}
    flushes = {h: same_everywhere(h + case.tokens > case.window, slots, torch.int8) for h in cursors}
    base, dt_bias, skip = same_everywhere(0, slots), i.dt_bias[:, 0].float().contiguous(), i.skip.float().contiguous()

    def step(batch: int, h: int) -> None:
        module.selective_state_update_replayssm_spec(
            states, records, record_dt, convolved, dt, i.a, write_pos=cursors[h], post_conv_state_pos=base,
            is_flush=flushes[h], query_start_loc=first, state_batch_indices=batches[batch], max_cache_len=bound,
            max_spec_len=case.tokens, d_inner=inner, ngroups=shape.groups, dstate=shape.state_dim, D=skip,
            dt_bias=dt_bias, out=i.out, bc_pre=products,
        )  # fmt: skip

    return step


_MAMBA2, _GDN = SsmKind.MAMBA2, SsmKind.GDN
PEERS = (
    Peer("replayssm-fork", "vllm", _GDN, Operation.UPDATE, one_token, _GDN_DECODE, _gdn_decode, _gdn_decode_blocks),
    Peer("replayssm-fork", "vllm", _GDN, Operation.UPDATE, many_tokens, _GDN_SPEC, _gdn_spec, _gdn_spec_blocks),
    Peer(
        "replayssm-fork", "vllm", _MAMBA2, Operation.UPDATE, many_tokens, _MAMBA_SPEC, _mamba_spec, _mamba_spec_blocks
    ),
)
