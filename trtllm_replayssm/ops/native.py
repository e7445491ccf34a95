"""The native operations over the pools' layer state: the reference's signatures, run by the CUDA kernels.

A pool is served by the kernels when the library has one for its shapes and formats (`unsupported` says why not);
there is no switch within a step. Nothing here waits for the device. Every launch is a programmatic one: it may start
while its predecessor drains, and waits for it on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ConfigError, ContractError, ReplaySSMError
from trtllm_replayssm.ops import _abi, torch_ops
from trtllm_replayssm.ops.layer_state import (
    ConventionalLayerState,
    CursorTensors,
    LayerState,
    ReplayLayerState,
    StepRows,
)
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

    def unsupported(self, state: LayerState, cursors: CursorTensors, activation: torch.dtype) -> str | None:
        """Why the library cannot run steps of a layer's pool, in its own words, or None. Also sizes the workspace."""
        if activation not in _ACTIVATIONS:
            return f"activations are {activation}; the kernels take bfloat16 and float16"
        slots = len(cursors.position)
        try:
            for tokens in sorted({1, state.config.max_step_tokens}):
                example = _example_tokens(state.shape, slots, tokens, activation, cursors.position.device)
                if isinstance(state, ConventionalLayerState):
                    named: dict[str, Tensor | None] = {**example, "entry": cursors.origin, "state": _entries(state)}
                    args = torch_ops.fill(_abi.ConventionalArgs, named, kind=_kind(state))
                    self._library.conventional_launch_text(args, multiprocessors=1)
                    continue
                self._reserve(self._library.update_workspace(_example_update(state, cursors, example)))
        except ReplaySSMError as error:
            return str(error)
        return None

    def require_launches(
        self, state: ReplayLayerState, cursors: CursorTensors, activation: torch.dtype, multiprocessors: int
    ) -> None:
        """Raise ConfigError where the library cannot launch a step as the pool's settings ask, on such a device."""
        for tuned in state.config.launches:
            example = _example_tokens(state.shape, tuned.rows, tuned.tokens, activation, cursors.position.device)
            constants = _abi.LaunchConstants(*tuned.launch.numbers)
            try:
                args = _example_update(state, cursors, example, launch=constants)
                self._library.update_launch_plan(args, multiprocessors)
            except ContractError as error:
                raise ConfigError(
                    "native update", f"launches: {tuned.rows} rows of {tuned.tokens} tokens", expected=error.expected,
                    got=str(tuned.launch), hint="Run trtllm-replayssm tune again, or leave the launch to the library",
                ) from error  # fmt: skip

    def mamba2_update(
        self, state: LayerState, cursors: CursorTensors, rows: StepRows, x: Tensor, k: Tensor, q: Tensor,
        dt: Tensor, a: Tensor, *, d_skip: Tensor, skip_below: float | None = None, settled: bool = False,
    ) -> Tensor:  # fmt: skip
        """As `reference.mamba2.mamba2_update` or `mamba2_conventional`; the result [B, T, H, P] is in x's type.

        skip_below: of replay states; raises UnsupportedError where the library has no kernel that skips.
        settled: the caller's promise of `RSSM_UPDATE_SETTLED_STATE` (update.h): whatever wrote the rows, cursors and
        states of this layer ends before a launch that is not programmatic, which lies between it and this one.
        """
        others = {"k": k, "q": q, "dt": dt, "a": a, "skip": d_skip, "log_decay": None, "beta": None}
        return self._update(state, cursors, rows, x, others, settled=settled, skip_below=skip_below)

    def gdn_update(
        self, state: LayerState, cursors: CursorTensors, rows: StepRows, q: Tensor, k: Tensor, v: Tensor,
        g: Tensor, beta: Tensor, *, settled: bool = False,
    ) -> Tensor:  # fmt: skip
        """As `reference.gdn.gdn_update` or `gdn_conventional`; the result [B, T, H, P] is in v's type.

        settled: as in `mamba2_update`.
        """
        others = {"k": k, "q": q, "dt": None, "a": None, "skip": None, "log_decay": g, "beta": beta}
        return self._update(state, cursors, rows, v, others, settled=settled)

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
            kind=int(_KINDS[shape.kind]), flags=_abi.CONV1D_PROGRAMMATIC_LAUNCH, dt_low=0.0, dt_high=math.inf,
            slot=rows.slot_int32, num_tokens=rows.num_tokens_int32, position=cursors.position, x=conv.x,
            weight=conv.weight, bias=conv.bias, decay_in=decay, beta_in=beta, dt_bias=dt_bias, a_log=a_log,
            window=conv.window, out=conv.out, decay_out=decay_out, beta_out=beta_out,
        )  # fmt: skip
        return decay_out, decay_out if beta_out is None else beta_out

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int, gate_first: bool
    ) -> Tensor:
        """`graph.Graph.gated_rms_norm` with its weight as a float32 vector: x, gate [B, T, D] -> [B, T, D]."""
        out: Tensor = torch.ops.replayssm.gated_rms_norm(
            flags=_abi.NORM_PROGRAMMATIC_LAUNCH, groups=groups, gate_first=int(gate_first), eps=eps, x=x, gate=gate,
            weight=weight,
        )  # fmt: skip
        return out

    def commit(self, config: ReplayConfig, cursors: CursorTensors, rows: StepRows, accepted: Tensor) -> None:
        """As `reference.commit.commit`."""
        torch.ops.replayssm.commit(
            window=config.window, ring_rows=config.ring_rows, slot=rows.slot_int32, num_tokens=rows.num_tokens_int32,
            accepted=_counts(config, accepted), origin=cursors.origin, h=cursors.h, position=cursors.position,
        )  # fmt: skip

    def commit_conventional(
        self, config: ReplayConfig, cursors: CursorTensors, rows: StepRows, accepted: Tensor
    ) -> None:
        """As `reference.commit.commit_conventional`."""
        torch.ops.replayssm.conventional_commit(
            entries=config.max_step_tokens + 1, slot=rows.slot_int32, num_tokens=rows.num_tokens_int32,
            accepted=_counts(config, accepted), entry=cursors.origin, position=cursors.position,
        )  # fmt: skip

    def _update(
        self, state: LayerState, cursors: CursorTensors, rows: StepRows, x: Tensor, others: dict[str, Tensor | None],
        *, settled: bool, skip_below: float | None = None,
    ) -> Tensor:  # fmt: skip
        tokens = {"value": x, **others}
        context = {"slot": rows.slot_int32, "num_tokens": rows.num_tokens_int32}
        flags = _abi.UPDATE_PROGRAMMATIC_LAUNCH | (_abi.UPDATE_SETTLED_STATE if settled else 0)  # both operations'
        out: Tensor
        if isinstance(state, ConventionalLayerState):
            out = torch.ops.replayssm.conventional_update(
                kind=_kind(state), flags=flags, **context, entry=cursors.origin, **tokens, state=_entries(state),
            )  # fmt: skip
            return out
        arguments: dict[str, Any] = {
            **layer_numbers(state), "flags": flags, **context, **registers(cursors), **tokens, **state_tensors(state),
            "workspace": self._workspace,
        }  # fmt: skip
        if skip_below is None:
            launch = state.config.launch(len(x), x.shape[1])
            out = torch.ops.replayssm.update(**arguments, launch=[] if launch is None else launch.numbers)
        else:
            out = torch.ops.replayssm.decay_skip_update(**arguments, skip_below=skip_below)
        return out

    def _reserve(self, size: int) -> None:
        if size > self._workspace.numel():
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._workspace.device)


def _counts(config: ReplayConfig, accepted: Tensor) -> Tensor:
    """int32 counts for the kernels, which clamp them to the rows' tokens; wider ones must fit first."""
    return accepted if accepted.dtype is torch.int32 else accepted.clamp(0, config.max_step_tokens).int()


def _kind(state: LayerState) -> int:
    return int(_KINDS[state.shape.kind])


def _entries(state: ConventionalLayerState) -> Tensor:
    """The states as conventional.h has them, [S, E, H, P * N]."""
    return state.states.flatten(3)


def _example_tokens(
    shape: SsmShape, rows: int, tokens: int, activation: torch.dtype, device: torch.device
) -> dict[str, Tensor | None]:
    """The inputs of a step of `rows` rows of padding, all in the memory of one: what the library needs to answer."""
    values = torch.empty((1, tokens, shape.heads, shape.head_dim), dtype=activation, device=device)
    keys = torch.empty((1, tokens, shape.groups, shape.state_dim), dtype=activation, device=device)
    scalars, vector = torch.empty((1, tokens, shape.heads), device=device), torch.empty(shape.heads, device=device)
    padding = torch.full((1,), -1, dtype=torch.int32, device=device).expand(rows)
    values, keys, scalars = (one.expand(rows, *one.shape[1:]) for one in (values, keys, scalars))
    gdn = shape.kind is SsmKind.GDN
    inputs = {"log_decay": scalars, "beta": scalars} if gdn else {"dt": scalars, "a": vector, "skip": vector}
    return {"slot": padding, "num_tokens": padding, "value": values, "k": keys, "q": keys, "out": values, **inputs}


def _example_update(
    state: ReplayLayerState, cursors: CursorTensors, example: dict[str, Tensor | None], **numbers: Any
) -> _abi.UpdateArgs:
    named = {**example, **registers(cursors), **state_tensors(state)}
    args: _abi.UpdateArgs = torch_ops.fill(_abi.UpdateArgs, named, **layer_numbers(state), **numbers)
    return args


def layer_numbers(state: ReplayLayerState) -> dict[str, int]:
    """What the ABI's structs say of a layer in integers."""
    return {"kind": _kind(state), "window": state.config.window, "layer": state.layer,
            "head_offset": state.shape.first_head}  # fmt: skip


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
