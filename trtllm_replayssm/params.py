"""What parameters a model has: name, shape and role. The models list them, the weight reader validates them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ParamRole(str, Enum):
    """How a parameter is used, which fixes the types a checkpoint may store it in."""

    LINEAR = "linear"  # [out, in] matrix of a linear layer: BF16/F16/F32, FP8 or NVFP4
    EMBEDDING = "embedding"  # [vocab, hidden]; BF16/F16/F32, or as LINEAR when it is an output head
    ROUTER = "router"  # [experts, hidden], never quantised
    CONV = "conv"  # [channels, 1, K], never quantised
    VECTOR = "vector"  # norms, biases, A_log, D, dt_bias: BF16/F16/F32, read as float32
    EXPERTS = "experts"  # a stack [experts, out, in], stored one by one or packed


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter under its canonical name (prefix `backbone.` or `model.`; `lm_head`, `mtp` at top level).

    Names of LINEAR, ROUTER and EMBEDDING parameters end in `.weight`. An EXPERTS parameter is named
    `<block>.experts.<projection>` with projection in gate_proj, up_proj, down_proj; in a checkpoint it is either
    `<block>.experts.<e>.<projection>.weight` or a packed tensor.
    recipe: which quantisation recipe touches it ("experts", "dense" or None for never).
    """

    name: str
    shape: tuple[int, ...]
    role: ParamRole
    recipe: str | None = None
