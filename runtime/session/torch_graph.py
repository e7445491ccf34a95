"""The torch interpreter of the graph vocabulary: tensors [B, T, channels], one forward pass of one step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.graph import MoeNames
from trtllm_replayssm.ops import native_experts
from trtllm_replayssm.ops.native_layers import Function
from trtllm_replayssm.runtime.session.joined_products import ends_block, followers
from trtllm_replayssm.runtime.session.native_layers import NativeLayers
from trtllm_replayssm.runtime.session.ranks import Sharing
from trtllm_replayssm.runtime.session.router_product import scores
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.torch_moe import route, routed_experts
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import AttentionShape, MoeShape, SsmShape


class TorchGraph:
    """Implements `graph.Graph`. Norms, decays, router scores and states are float32 whatever the activation type."""

    def __init__(
        self, weights: TorchWeights, state_ops: StateOps, context: StepContext, *, poison: bool = False,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        """poison: make the rows of tokens that do not exist NaN, so that a wrong read of one shows. sharing: weights
        and state operations are those of one of several ranks.
        """
        self._sharing = sharing
        self._weights = weights
        self._state_ops = state_ops
        self._ctx = context
        self._poison = poison
        inboxes = None if sharing is None else sharing.inboxes
        self._layers = NativeLayers(context, inboxes) if state_ops.native_heads else None
        self._products: dict[str, tuple[Tensor, Tensor]] = {}  # made with another product of the same input

    def embedding(self, ids: Tensor, table: str) -> Tensor:
        rows = functional.embedding(ids, self._weights.matrix(table))
        return rows.masked_fill(~self._ctx.valid()[..., None], float("nan")) if self._poison else rows

    def linear(self, x: Tensor, weight: str) -> Tensor:
        if self._layers is not None and self._sharing is None and ends_block(weight):
            parts = self._state_ops.linear_in_parts(x, self._weights.matrix(weight))
            if parts is not None:
                return self._layers.in_parts(parts)
        product = self._product(x, weight)
        return self._over_ranks(product) if self._sharing and weight in self._sharing.partial else product

    def _product(self, x: Tensor, weight: str, others: Sequence[str] = ()) -> Tensor:
        """`linear` of the inputs that are here: one of several addends where ranks share the matrix's inputs. others:
        matrices whose products with x are asked for next; they are made with this one.
        """
        source, product = self._products.pop(weight, (None, None))
        if source is x and product is not None:
            return product
        others = others or ([] if self._layers is None else followers(weight))
        if not others:
            return self._state_ops.linear(x, self._weights.matrix(weight))
        names = [weight, *others]
        whole = self._state_ops.linear(x, self._state_ops.derived.joined(self._weights, names))
        first, *rest = self.split(whole, [len(self._weights.matrix(name)) for name in names])
        self._products |= {name: (x, part) for name, part in zip(others, rest, strict=True)}
        return first

    def lm_head(self, x: Tensor, weight: str) -> Tensor:
        table = self._weights.matrix(weight)
        if self._sharing is not None:
            table = self._sharing.own_rows(table)
        logits = self._state_ops.wide_linear(x, table)
        return logits if self._sharing is None or self._ctx.own_logits else self._sharing.ranks.join(logits)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b if self._layers is None else self._layers.add(a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b if self._layers is None else self._layers.mul(a, b)

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self._layers is None else self._layers.activation(Function.SILU, x)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid() if self._layers is None else self._layers.activation(Function.SIGMOID, x)

    def relu2(self, x: Tensor) -> Tensor:
        return functional.relu(x).square() if self._layers is None else self._layers.relu2(x)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim=-1)

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(x.split(list(sizes), dim=-1))

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        split: Tensor = x.unflatten(-1, (heads, -1))  # always a view
        return split

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.flatten(-2) if self._layers is None else self._layers.merge_heads(x)

    def rms_norm(self, x: Tensor, weight: str, eps: float, *, unit_offset: bool) -> Tensor:
        if self._layers is not None:
            norm = self._layers.head_norm if x.dim() == 4 else self._layers.rms_norm
            return norm(x, self._weights.vector(weight), eps, unit_offset=unit_offset)
        scale = self._weights.vector(weight) + float(unit_offset)
        return (_normalised(x.float(), eps) * scale).to(x.dtype)

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: str, eps: float, *, groups: int, gate_first: bool
    ) -> Tensor:
        native = self._state_ops.native
        if native is not None:
            vector = self._weights.vector(weight)
            return native.gated_rms_norm(x, gate, vector, eps, groups=groups, gate_first=gate_first)
        scale, opening = self._weights.vector(weight), functional.silu(gate.float())
        wide = x.float() * opening if gate_first else x.float()
        normalised = _normalised(wide.unflatten(-1, (groups, -1)), eps)
        if gate_first:
            return (normalised.flatten(-2) * scale).to(x.dtype)
        return ((normalised * scale).flatten(-2) * opening).to(x.dtype)

    def rope(self, x: Tensor, rotary_dim: int, theta: float) -> Tensor:
        if self._layers is not None:
            return self._layers.rope(x, self._state_ops.rotation(rotary_dim, theta))
        half = rotary_dim // 2
        frequency = theta ** (torch.arange(half, device=x.device, dtype=torch.float64) * (-2.0 / rotary_dim))
        angle = self._ctx.positions().double()[..., None, None] * frequency  # float64: exact at long positions
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = x[..., :half].float(), x[..., half:rotary_dim].float()
        turned = [first * cos - second * sin, second * cos + first * sin, x[..., rotary_dim:].float()]
        return torch.cat(turned, dim=-1).to(x.dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, shape: AttentionShape) -> Tensor:
        if self._layers is not None:
            return self._layers.attention(self._state_ops.kv(layer), q, k, v)
        return self._state_ops.attention(self._ctx, layer, q, k, v)

    def causal_conv1d(self, x: Tensor, weight: str, bias: str | None, *, layer: int, kernel: int) -> Tensor:
        bias_vector = None if bias is None else self._weights.vector(bias)
        return self._state_ops.conv1d(self._ctx, layer, x, self._weights.vector(weight), bias_vector)

    def mamba2(
        self, x: Tensor, k: Tensor, q: Tensor, dt: Tensor, *, layer: int, shape: SsmShape,
        a_log: str, d_skip: str, dt_bias: str,
    ) -> Tensor:  # fmt: skip
        decay = self._state_ops.discretise(self._ctx, layer, dt, self._weights.vector(dt_bias))
        o = self._state_ops.mamba2(
            self._ctx, layer, self.split_heads(x, shape.heads), self.split_heads(k, shape.groups),
            self.split_heads(q, shape.groups), decay,
            self._state_ops.rates(layer, self._weights.vector(a_log)), self._weights.vector(d_skip),
        )  # fmt: skip
        return self.merge_heads(o)

    def gdn(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, layer: int, shape: SsmShape,
        a_log: str, dt_bias: str,
    ) -> Tensor:  # fmt: skip
        a_vector, bias = self._weights.vector(a_log), self._weights.vector(dt_bias)
        g, beta = self._state_ops.gates(self._ctx, layer, a, b, a_vector, bias)
        o = self._state_ops.gdn(
            self._ctx, layer, self.split_heads(q, shape.groups), self.split_heads(k, shape.groups),
            self.split_heads(v, shape.heads), g, beta,
        )  # fmt: skip
        return self.merge_heads(o)

    def moe(self, x: Tensor, names: MoeNames, shape: MoeShape) -> Tensor:
        width = x.shape[-1] if shape.latent is None else shape.latent
        if self._state_ops.native is not None and native_experts.serves(shape, width, x.dtype):
            return self._native_moe(x, names, shape)
        valid = self._ctx.valid()
        tokens = x[valid]
        bias = None if names.router_bias is None else self._weights.vector(names.router_bias)
        ids, weights = route(functional.linear(tokens.float(), self._weights.matrix_float32(names.router)), bias, shape)
        routed = routed_experts(
            self._latent(tokens, names.latent_in), self._own(ids, shape), weights, shape,
            lambda projection, e: self._weights.expert(f"{names.experts}.{projection}", e),
        )  # fmt: skip
        routed = self._latent(routed, names.latent_out)
        shared = self._product(self._shared_inner(tokens, names, shape), f"{names.shared}.down_proj.weight")
        if names.shared_gate is None:
            both = routed + shared
        else:
            both = torch.addcmul(routed, self.linear(tokens, names.shared_gate).sigmoid(), shared)
        out = torch.zeros_like(x)
        out[valid] = both
        return self._over_ranks(out)

    def _native_moe(self, x: Tensor, names: MoeNames, shape: MoeShape) -> Tensor:
        """`moe` over all tokens, as picking the existing ones would wait for the device; others get what means nothing.

        The shared expert's gate is one more output of the router's product and its sigmoid a factor of the inner
        channels, its first product is made with that into the latent space, and its last one adds to the routed
        experts' sum: no launch is for these alone.
        """
        tokens = x.flatten(0, 1)
        bias = None if names.router_bias is None else self._weights.vector(names.router_bias)
        router = self._state_ops.derived.router(self._weights, names.router, names.shared_gate)
        logits = scores(tokens, router)
        opening = None if names.shared_gate is None else logits[:, shape.experts]
        logits = logits[:, : shape.experts].unflatten(0, x.shape[:2])
        inner = tokens
        if names.latent_in is not None:
            first = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
            inner = self._product(tokens, names.latent_in, [f"{names.shared}.{name}.weight" for name in first])
        ids, weights = native_experts.route(logits, bias, shape, self._ctx.rows)
        stacks = self._weights.expert_stacks(names.experts, gated=shape.gated)
        routed = self._latent(native_experts.experts(inner, self._own(ids, shape), weights, stacks), names.latent_out)
        down = self._weights.matrix(f"{names.shared}.down_proj.weight")
        both = routed.addmm_(self._shared_inner(tokens, names, shape, opening), down.t())
        return self._over_ranks(both.view_as(x))

    def _latent(self, x: Tensor, weight: str | None) -> Tensor:
        return x if weight is None else self.linear(x, weight)

    def _own(self, ids: Tensor, shape: MoeShape) -> Tensor:
        return ids if self._sharing is None else self._sharing.own_experts(ids, shape.experts)

    def _shared_inner(self, x: Tensor, names: MoeNames, shape: MoeShape, opening: Tensor | None = None) -> Tensor:
        """The shared expert's inner channels, of several ranks this one's, times sigmoid(opening [n] float32)."""
        gate = self.linear(x, f"{names.shared}.gate_proj.weight") if shape.gated else None
        up = self.linear(x, f"{names.shared}.up_proj.weight")
        if opening is not None and self._layers is not None:
            return self._layers.opened(gate, up, opening)
        inner = self.relu2(up) if gate is None else self.mul(self.silu(gate), up)
        return inner if opening is None else (inner * opening.sigmoid()[:, None]).to(inner.dtype)

    def select_tokens(self, x: Tensor) -> Tensor:
        if self._ctx.phase is Phase.DECODE:
            return x
        return last_tokens(x, self._ctx)

    def _over_ranks(self, addend: Tensor) -> Tensor:
        """The sum of every rank's [B, T, hidden]; it may go nowhere but into an `add`, once."""
        if self._sharing is None:
            return addend
        later = None if self._layers is None else self._layers.over_ranks(addend)
        return self._sharing.ranks.add_up(addend) if later is None else later


def last_tokens(x: Tensor, ctx: StepContext) -> Tensor:
    """[B, T, ...] -> [B, 1, ...]: each row's last existing token (its first when it has none)."""
    last = (ctx.rows.num_tokens - 1).clamp(min=0)
    return x[torch.arange(len(last), device=x.device), last][:, None]


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
