"""What every plugin layer is given: the one list that the builder fills and the plugin library parses.

All fields are arrays of one element, INT32 but for `REAL_FIELDS`, all required, unknown ones refused. Inputs come in
the order written here: data, then step rows, then cursors, then weights, then state; every state tensor is also an
output at the same address (aliased), after the plugin's own outputs, in the same order.

Data inputs are whole projections [B, T, C]; `<input>_offset` says at which channel the argument starts, so that no
slice is copied. Row stride is C, the extent of the last axis.

State tensors of one recurrent layer are those of `bindings.ssm_tensors`, in that order, so that which of them exist
follows from `recurrence`, `read` and the kind. The phase is the extent of the input `phase`: 1 decode or verify step,
2 prompt chunk, whose rows take their state from where `row_flags` (RSSM_PREFILL_*) say.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.bindings import (
    CARRY_INDEX,
    COMMIT,
    CONV1D,
    CURSORS,
    GDN,
    MAMBA2,
    MOE,
    NUM_TOKENS,
    PHASE,
    ROUTE,
    ROW_FLAGS,
    SLOT,
)
from trtllm_replayssm.dtypes import ActivationDtype, Rounding, StateFormat
from trtllm_replayssm.shapes import Router
from trtllm_replayssm.weights.matrix import MatrixFormat

NAMESPACE = "replayssm"
VERSION = "1"
LIBRARY = "libtrtllm_replayssm_plugins.so"

# Values of enumerating fields. Types count as in include/replayssm/tensor.h; 0 is "none".
STATE_FORMAT_CODES = {None: 0, StateFormat.FLOAT32: 1, StateFormat.FLOAT16: 2, StateFormat.FP8: 4, StateFormat.NVFP4: 5}
ACTIVATION_CODES = {ActivationDtype.FLOAT32: 1, ActivationDtype.FLOAT16: 2, ActivationDtype.BFLOAT16: 3}
ROUNDING_CODES = {Rounding.NEAREST: 0, Rounding.STOCHASTIC: 1}
# Of packed experts: what is not quantised is packed as bfloat16.
WEIGHT_FORMAT_CODES = {
    MatrixFormat.F32: 3, MatrixFormat.F16: 3, MatrixFormat.BF16: 3, MatrixFormat.FP8: 4, MatrixFormat.NVFP4: 5,
}  # fmt: skip
ROUTER_CODES = {Router.SOFTMAX: 0, Router.SIGMOID_BIAS: 1}
REAL_FIELDS = ("scaling",)  # FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """One plugin: its fields, and its inputs in order up to the state tensors; outputs are its own ones.

    data: arguments that are channel ranges of projections (each has a field `<name>_offset`); rows: step tensors;
    weights: parameters, float32 [channels] and the like.
    """

    name: str
    fields: tuple[str, ...]
    data: tuple[str, ...]
    rows: tuple[str, ...]
    cursors: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def all_fields(self) -> tuple[str, ...]:
        """Own fields, then one offset per data input."""
        return (*self.fields, *(f"{name}_offset" for name in self.data))


_STEP = (SLOT, NUM_TOKENS, ROW_FLAGS, CARRY_INDEX, PHASE)
_POOL = ("window", "max_step_tokens", "recurrence", "rounding", "read", "layer", "head_offset", "activation")
_SHAPE = ("heads", "groups", "head_dim", "state_dim")

PLUGINS = {
    # x [H * P], k and q [G * N] activation; dt [H] float32 after softplus; a = -exp(A_log) and skip = D float32 [H]
    MAMBA2: PluginSpec(
        name=MAMBA2, fields=(*_SHAPE, *_POOL), data=("x", "k", "q", "dt"), rows=_STEP, cursors=CURSORS,
        weights=("a", "skip"), outputs=("out",),
    ),
    # q, k [G * N] and v [H * P] activation, raw; log_decay and beta [H] float32
    GDN: PluginSpec(
        name=GDN, fields=(*_SHAPE, *_POOL), data=("q", "k", "v", "log_decay", "beta"), rows=_STEP, cursors=CURSORS,
        weights=(), outputs=("out",),
    ),
    # x [channels] activation; weight [channels, 1, kernel] and bias [channels] float32 (zeros where there is none)
    CONV1D: PluginSpec(
        name=CONV1D, fields=("channels", "kernel", "max_step_tokens", "layer", "activation"), data=("x",),
        rows=(SLOT, NUM_TOKENS, PHASE), cursors=("cursor_position",), weights=("weight", "bias"), outputs=("out",),
    ),
    # logits [experts] float32 of all experts; router_bias [experts] float32 (zeros where there is none, not read with
    # softmax) -> ids [top_k] int32, -1 for tokens that do not exist, and weights [top_k] float32
    ROUTE: PluginSpec(
        name=ROUTE, fields=("experts", "top_k", "router", "groups", "topk_group", "norm_topk", "scaling"),
        data=("logits",), rows=(SLOT, NUM_TOKENS), cursors=(), weights=("router_bias",), outputs=("ids", "weights"),
    ),
    # x [width] activation; ids [top_k] int32, counted from the first of the `experts` that are here, others give no
    # work; weights [top_k] float32; then the tensors of `weights.expert_tensors`, which are inputs and no state
    MOE: PluginSpec(
        name=MOE, fields=("experts", "top_k", "width", "intermediate", "gated", "weight_format", "activation"),
        data=("x", "ids", "weights"), rows=(), cursors=(), weights=(), outputs=("out",),
    ),
    # after a step or a prompt chunk, once for all layers: `after` is the step's last tensor [B, T, hidden], which
    # orders the two; accepted [B] int32; state: origin, h and cursor_position
    COMMIT: PluginSpec(
        name=COMMIT, fields=("window", "max_step_tokens"), data=(), rows=("after", SLOT, NUM_TOKENS, "accepted", PHASE),
        cursors=(), weights=(), outputs=(),
    ),
}  # fmt: skip
