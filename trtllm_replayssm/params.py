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


@dataclass(frozen=True, slots=True)
class Span:
    """`channels` consecutive channels in `units` equal pieces that stay whole: heads, groups, experts, channels."""

    channels: int
    units: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor-parallel ranks share a parameter: each takes its pieces of every span, in order, along `axis`.

    axis 0: outputs, heads or experts of its own. axis 1: inputs of its own, so that the results of the ranks add up.
    """

    axis: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter under its canonical name (prefix `backbone.` or `model.`; `lm_head`, `mtp` at top level).

    Names of LINEAR, ROUTER and EMBEDDING parameters end in `.weight`. An EXPERTS parameter is named
    `<block>.experts.<projection>` with projection in gate_proj, up_proj, down_proj; in a checkpoint it is either
    `<block>.experts.<e>.<projection>.weight` or a packed tensor.
    recipe: which quantisation recipe touches it ("experts", "dense" or None for never).
    cut: how tensor-parallel ranks share it; None: each has all of it.
    """

    name: str
    shape: tuple[int, ...]
    role: ParamRole
    recipe: str | None = None
    cut: Cut | None = None
