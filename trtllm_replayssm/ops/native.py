"""The native operations over the pools' layer state: the reference's signatures, run by the CUDA kernels.

A pool is served by the kernels when the library has one for its shapes and formats (`unsupported` says why not);
there is no switch within a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.ops import _abi, torch_ops
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState, StepRows
from trtllm_replayssm.shapes import SsmKind, SsmShape

_KINDS = {SsmKind.MAMBA2: _abi.Kind.MAMBA2, SsmKind.GDN: _abi.Kind.GDN}
_ACTIVATIONS = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Convolution:
    """A convolution that has not run: its launch waits for the decay inputs of the same layer.

    window [S, R, D] and x, out [B, T, D] in the activation type; weight [D, K] and bias [D] float32. `out` is filled by
    `NativeOps.ssm_inputs`; until then only views of it may be taken. prompt: a chunk of a prompt, of any length.
    """

    layer: int
    window: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    prompt: bool


class NativeOps:
    """Steps of one pool. Holds the workspace, which all layers share: their launches follow one another."""

    def __init__(self, library: _abi.Library, device: torch.device) -> None:
        """library: the one that the custom operations call."""
        self._library = library
        self._workspace = torch.zeros(0, dtype=torch.uint8, device=device)

    def unsupported(self, state: ReplayLayerState, cursors: CursorTensors) -> str | None:
        """Why the library cannot run steps of a layer's pool, in its own words, or None. Also sizes the workspace."""
        if state.ring_key.dtype not in _ACTIVATIONS:
            return f"activations are {state.ring_key.dtype}; the kernels take bfloat16 and float16"
        slots = state.ring_key.shape[0]
        try:
            for tokens in sorted({1, state.config.max_step_tokens}):
                self._reserve(self._library.update_workspace(self._example(state, cursors, slots, tokens)))
        except ReplaySSMError as error:
            return str(error)
        return None

    def mamba2_update(
        self, state: ReplayLayerState, cursors: CursorTensors, rows: StepRows, x: Tensor, k: Tensor, q: Tensor,
        dt: Tensor, a: Tensor, *, d_skip: Tensor,
    ) -> Tensor:  # fmt: skip
        """As `reference.mamba2.mamba2_update`, but the result [B, T, H, P] is in x's type."""
        tokens = {"value": x, "k": k, "q": q, "dt": dt, "a": a, "skip": d_skip, "log_decay": None, "beta": None}
        return self._update(state, cursors, rows, tokens)

    def gdn_update(
        self, state: ReplayLayerState, cursors: CursorTensors, rows: StepRows, q: Tensor, k: Tensor, v: Tensor,
        g: Tensor, beta: Tensor,
    ) -> Tensor:  # fmt: skip
        """As `reference.gdn.gdn_update`, but the result [B, T, H, P] is in v's type."""
        tokens = {"value": v, "k": k, "q": q, "dt": None, "a": None, "skip": None, "log_decay": g, "beta": beta}
        return self._update(state, cursors, rows, tokens)

    def ssm_inputs(
        self, shape: SsmShape, conv: Convolution, cursors: CursorTensors, rows: StepRows, decay: Tensor,
        beta: Tensor | None, dt_bias: Tensor, *, a_log: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run a convolution, and in the same launch make the decay inputs [B, T, H] float32 of the recurrence.

        decay [B, T, H]: raw dt (Mamba-2: returned after softplus, twice) or a (GDN: returned log-decay and beta).
        """
        operation = torch.ops.replayssm.ssm_inputs_prefill if conv.prompt else torch.ops.replayssm.ssm_inputs_update
        decay_out = torch.empty(decay.shape, device=decay.device)
        beta_out = None if beta is None else torch.empty_like(decay_out)
        operation(
            kind=int(_KINDS[shape.kind]), flags=0, dt_low=0.0, dt_high=math.inf, slot=rows.slot_int32,
            num_tokens=rows.num_tokens_int32, position=cursors.position, x=conv.x, weight=conv.weight, bias=conv.bias,
            decay_in=decay, beta_in=beta, dt_bias=dt_bias, a_log=a_log, window=conv.window, out=conv.out,
            decay_out=decay_out, beta_out=beta_out,
        )  # fmt: skip
        return decay_out, decay_out if beta_out is None else beta_out

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int, gate_first: bool
    ) -> Tensor:
        """`graph.Graph.gated_rms_norm` with its weight as a float32 vector: x, gate [B, T, D] -> [B, T, D]."""
        out: Tensor = torch.ops.replayssm.gated_rms_norm(
            flags=0, groups=groups, gate_first=int(gate_first), eps=eps, x=x, gate=gate, weight=weight
        )
        return out

    def commit(self, config: ReplayConfig, cursors: CursorTensors, rows: StepRows, accepted: Tensor) -> None:
        """As `reference.commit.commit`."""
        torch.ops.replayssm.commit(
            window=config.window, ring_rows=config.ring_rows, slot=rows.slot_int32, num_tokens=rows.num_tokens_int32,
            accepted=accepted.clamp(0, config.max_step_tokens).int(), origin=cursors.origin, h=cursors.h,
            position=cursors.position,
        )  # fmt: skip

    def _update(
        self, state: ReplayLayerState, cursors: CursorTensors, rows: StepRows, tokens: dict[str, Tensor | None]
    ) -> Tensor:
        out: Tensor = torch.ops.replayssm.update(
            **layer_numbers(state), flags=0, slot=rows.slot_int32, num_tokens=rows.num_tokens_int32,
            **registers(cursors), **tokens, **state_tensors(state), workspace=self._workspace,
        )  # fmt: skip
        return out

    def _example(self, state: ReplayLayerState, cursors: CursorTensors, rows: int, tokens: int) -> _abi.UpdateArgs:
        """The arguments of a step of `rows` rows of padding: what the library needs to know to answer."""
        shape, act, device = state.shape, state.ring_key.dtype, state.ring_key.device
        values = torch.empty((rows, tokens, shape.heads, shape.head_dim), dtype=act, device=device)
        keys = torch.empty((rows, tokens, shape.groups, shape.state_dim), dtype=act, device=device)
        scalars = torch.empty((rows, tokens, shape.heads), device=device)
        vector = torch.empty(shape.heads, device=device)
        padding = torch.full((rows,), -1, dtype=torch.int32, device=device)
        gdn = shape.kind is SsmKind.GDN
        inputs = {"log_decay": scalars, "beta": scalars} if gdn else {"dt": scalars, "a": vector, "skip": vector}
        args: _abi.UpdateArgs = torch_ops.fill(
            _abi.UpdateArgs,
            {
                "slot": padding, "num_tokens": padding, "value": values, "k": keys, "q": keys, "out": values, **inputs,
                **registers(cursors), **state_tensors(state),
            },
            **layer_numbers(state),
        )  # fmt: skip
        return args

    def _reserve(self, size: int) -> None:
        if size > self._workspace.numel():
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._workspace.device)


def layer_numbers(state: ReplayLayerState) -> dict[str, int]:
    """What the ABI's structs say of a layer in integers."""
    kind = int(_KINDS[state.shape.kind])
    return {"kind": kind, "window": state.config.window, "layer": state.layer, "head_offset": 0}


def registers(cursors: CursorTensors) -> dict[str, Tensor | None]:
    """The per-slot registers by the names of the ABI."""
    return {"origin": cursors.origin, "h": cursors.h, "position": cursors.position, "seed": cursors.seed}


def state_tensors(state: ReplayLayerState) -> dict[str, Tensor | None]:
    """Checkpoint copies and ring by the names of the ABI; None: absent."""
    checkpoint, read = state.checkpoint, state.read_copy
    return {
        "checkpoint": checkpoint.data,
        "checkpoint_scale": checkpoint.block_scale,
        "read": None if read is None else read.data,
        "read_scale": None if read is None else read.block_scale,
        "read_head_scale": None if read is None else read.head_scale,
        "ring_value": state.ring_value,
        "ring_k": state.ring_key,
        "ring_dt": state.ring_decay,
        "ring_key_factor": state.ring_key_factor,
        "ring_v": state.ring_v,
        "ring_beta": state.ring_beta,
    }
