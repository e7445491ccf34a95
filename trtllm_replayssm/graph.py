"""The vocabulary a model may use: one protocol, implemented by each interpreter.

A model (`trtllm_replayssm.models`) is a function over this protocol, written once. Interpreters: numpy float64
(`spec/graph.py`, the judge), torch (`runtime/session/torch_graph.py`), TensorRT (`builders/`, lowers to a network).

`Tensor` is whatever the interpreter uses. Activations have shape [..., channels]; leading axes belong to the
interpreter ([tokens] or [B, T]). Parameters are canonical names (`params.ParamSpec`), never arrays: only the
interpreter touches weights. `layer` is the absolute layer index, which selects the state of a stateful operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from trtllm_replayssm.shapes import AttentionShape, MoeShape, SsmShape

Tensor = TypeVar("Tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNames:
    """Canonical parameter names of one mixture-of-experts block; None where the block has no such part."""

    router: str
    router_bias: str | None
    experts: str  # the prefix: <experts>.<projection> names a stack
    latent_in: str | None
    latent_out: str | None
    shared: str  # the prefix of the shared expert's projections
    shared_gate: str | None


@dataclass(frozen=True, slots=True)
class ModelOutput(Generic[Tensor]):
    """hidden: [..., hidden] after the final norm, of every token; logits: [..., vocab] of the selected tokens."""

    hidden: Tensor
    logits: Tensor


class Graph(Protocol[Tensor]):
    """Operations of the four models. Every method returns a new tensor handle."""

    def embedding(self, ids: Tensor, table: str) -> Tensor:
        """Rows of `table` [vocab, hidden] at integer `ids` [...] -> [..., hidden]."""
        ...

    def linear(self, x: Tensor, weight: str) -> Tensor:
        """x [..., in] times the transpose of `weight` [out, in] -> [..., out]."""
        ...

    def lm_head(self, x: Tensor, weight: str) -> Tensor:
        """As `linear`, the result in the interpreter's logits type (float32 or wider)."""
        ...

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise sum of equal shapes."""
        ...

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise product of equal shapes."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x)."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """1 / (1 + exp(-x))."""
        ...

    def relu2(self, x: Tensor) -> Tensor:
        """max(x, 0) squared."""
        ...

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenation along the last axis."""
        ...

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Consecutive pieces of the last axis; the sizes add up to it."""
        ...

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """[..., heads * d] -> [..., heads, d]."""
        ...

    def merge_heads(self, x: Tensor) -> Tensor:
        """[..., heads, d] -> [..., heads * d]."""
        ...

    def rms_norm(self, x: Tensor, weight: str, eps: float, *, unit_offset: bool) -> Tensor:
        """w * x / sqrt(mean(x^2) + eps) over the last axis; w is 1 + weight when unit_offset (added in float32)."""
        ...

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: str, eps: float, *, groups: int, gate_first: bool
    ) -> Tensor:
        """RMSNorm over `groups` contiguous groups of the last axis, gated by SiLU(gate).

        gate_first (Mamba-2): norm(x * SiLU(gate)) * weight [channels].
        otherwise (GDN): norm(x) * weight * SiLU(gate), weight [channels / groups] shared by the groups.
        """
        ...

    def rope(self, x: Tensor, rotary_dim: int, theta: float) -> Tensor:
        """Rotary embedding of the first `rotary_dim` of [..., heads, d], pairs (i, i + rotary_dim / 2)."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, shape: AttentionShape) -> Tensor:
        """Causal softmax(q k^T / sqrt(d)) v over the layer's KV slot; [..., heads, d] -> [..., heads * d]."""
        ...

    def causal_conv1d(self, x: Tensor, weight: str, bias: str | None, *, layer: int, kernel: int) -> Tensor:
        """SiLU of the depthwise causal convolution over the layer's window; [..., channels] -> same."""
        ...

    def mamba2(
        self,
        x: Tensor,
        k: Tensor,
        q: Tensor,
        dt: Tensor,
        *,
        layer: int,
        shape: SsmShape,
        a_log: str,
        d_skip: str,
        dt_bias: str,
    ) -> Tensor:
        """Mamba-2 recurrence (paper, Eq. 1) with the D skip.

        x [..., H * P], k (B) and q (C) [..., G * N] after the convolution, dt [..., H] raw -> [..., H * P].
        """
        ...

    def gdn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        layer: int,
        shape: SsmShape,
        a_log: str,
        dt_bias: str,
    ) -> Tensor:
        """Gated DeltaNet recurrence (paper, Eq. 2-3).

        q, k [..., G * N] and v [..., H * P] after the convolution, raw (normalised inside); a, b [..., H]
        -> [..., H * P].
        """
        ...

    def moe(self, x: Tensor, names: MoeNames, shape: MoeShape) -> Tensor:
        """Mixture of experts with shared expert; [..., hidden] -> same."""
        ...

    def select_tokens(self, x: Tensor) -> Tensor:
        """The tokens whose logits this step needs (all of a decode step, the last of a prompt)."""
        ...
