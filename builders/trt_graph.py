"""The TensorRT interpreter of the graph vocabulary: lowers a model to strongly typed networks and native operations.

Norms, activations, router logits and rotary run in float32 between roundings to the activation type, as in the torch
interpreter. Parts of a projection are views: TensorRT layers slice them, native operations read them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trtllm_replayssm.bindings import (
    ALIAS_SUFFIX,
    CONV1D,
    GDN,
    LOGITS,
    MAMBA2,
    MOE,
    POSITION,
    POSITIONS,
    TOKEN_INDEX,
    TensorSpec,
    kv_tensors,
    step_inputs,
)
from trtllm_replayssm.builders.attention import attend, rotary, scaled_query, update_cache
from trtllm_replayssm.builders.elementwise import normalised, silu, softplus
from trtllm_replayssm.builders.linear import dense_constant, linear
from trtllm_replayssm.builders.native_ops import OWN_LOGITS, NativeOps
from trtllm_replayssm.builders.network import Network
from trtllm_replayssm.builders.parameters import Parameters
from trtllm_replayssm.builders.segments import ProgramBuilder, Value
from trtllm_replayssm.graph import MoeNames
from trtllm_replayssm.shapes import AttentionShape, MoeShape, SsmShape
from trtllm_replayssm.weights.matrix import DenseMatrix
from trtllm_replayssm.weights.shard import own_rows
from trtllm_replayssm.weights.tensor_parallel import partial_results


class TrtGraph:
    """Implements `graph.Graph` over `Value`. depth: positions of a cache row, T_max included."""

    def __init__(
        self, parameters: Parameters, program: ProgramBuilder, native: NativeOps, *, activation: str, depth: int
    ) -> None:
        self._parameters = parameters
        self._program = program
        self._native = native
        self._activation = activation
        self._depth = depth
        self._parallel = parameters.parallel
        self._partial = partial_results(parameters.geometry) if self._parallel.size > 1 else frozenset()
        self.inputs = {n: program.declare(s) for n, s in step_inputs(parameters.geometry, activation).items()}

    @property
    def _net(self) -> Network:
        return self._program.network

    def embedding(self, ids: Value, table: str) -> Value:
        # a network of its own, so that the drafting head runs the same engine and the table is stored once
        self._program.cut("before embedding")
        matrix, tokens = self._dense(table), self._tensor(ids)
        rows = dense_constant(self._net, table, matrix, rank=2)
        found = self._net.named(self._net.definition.add_gather(rows, tokens, 0), "embedding")
        embedded = self._put(found, "embedded", matrix.shape[1])
        self._program.cut("embedding", share=f"embedding {table}")
        return embedded

    def linear(self, x: Value, weight: str) -> Value:
        product = self._product(x, weight)
        return self._native.add_up(product) if weight in self._partial else product

    def _product(self, x: Value, weight: str) -> Value:
        """`linear` of the inputs that are here: one of several addends where ranks share the matrix's inputs."""
        matrix, tensor = self._parameters.matrix(weight), self._tensor(x)
        out = linear(self._net, tensor, weight, matrix)
        return self._put(out, weight.removesuffix(".weight") + ".out", matrix.shape[0])

    def lm_head(self, x: Value, weight: str) -> Value:
        self._program.cut("before output head")
        geometry, shared = self._parameters.geometry, self._parallel.size > 1
        matrix = own_rows(self._parameters.matrix(weight), weight, geometry.vocab, self._parallel)
        tensor = self._tensor(x)
        # of a table that is the embedding's as well, a rank multiplies with a part: a constant of its own
        table = f"own rows of {weight}" if shared and geometry.tie_embeddings else weight
        out = self._net.wide(linear(self._net, tensor, table, matrix))
        name = OWN_LOGITS if shared else LOGITS
        self._program.put(out, name, "float32", "B", "K", matrix.shape[0], exact=True)
        if not shared:
            self._program.keep(name)
        self._program.cut("output head", share=f"output head {weight}")
        logits = Value(name, 0, matrix.shape[0])
        return self._native.join(logits, LOGITS, geometry.vocab) if shared else logits

    def add(self, a: Value, b: Value) -> Value:
        left, right = self._program.tensors([a, b])
        return self._like(a, self._net.binary(left, right, "SUM", "add"), "sum")

    def mul(self, a: Value, b: Value) -> Value:
        left, right = self._program.tensors([a, b])
        return self._like(a, self._net.binary(left, right, "PROD", "mul"), "product")

    def silu(self, x: Value) -> Value:
        tensor = self._tensor(x)
        return self._like(x, self._net.narrow(silu(self._net, tensor)), "silu")

    def sigmoid(self, x: Value) -> Value:
        tensor = self._tensor(x)
        wide = self._net.wide(tensor)
        return self._like(x, self._net.narrow(self._net.activate(wide, "SIGMOID", "sigmoid")), "sigmoid")

    def relu2(self, x: Value) -> Value:
        tensor = self._tensor(x)
        positive = self._net.activate(self._net.wide(tensor), "RELU", "relu")
        return self._like(x, self._net.narrow(self._net.binary(positive, positive, "PROD", "square")), "relu2")

    def concat(self, parts: Sequence[Value]) -> Value:
        tensors = self._program.tensors(parts)
        joined = self._net.concat_last(tensors, "concat")
        return self._put(joined, "joined", sum(p.width for p in parts))

    def split(self, x: Value, sizes: Sequence[int]) -> list[Value]:
        starts = [x.start + sum(sizes[:i]) for i in range(len(sizes))]
        return [Value(x.name, s, w, x.heads, x.heads_first) for s, w in zip(starts, sizes, strict=True)]

    def split_heads(self, x: Value, heads: int) -> Value:
        width, tensor = x.width // heads, self._tensor(x)
        split = self._net.reshape(tensor, (0, 0, heads, width), "split heads")
        return self._put(split, "heads", heads, width)

    def merge_heads(self, x: Value) -> Value:
        assert x.heads is not None
        order = (0, 2, 1, 3) if x.heads_first else (0, 1, 2, 3)
        width, tensor = x.heads * x.width, self._tensor(x)
        ordered = self._net.transpose(tensor, order, "order heads")
        return self._put(self._net.reshape(ordered, (0, 0, width), "merge heads"), "merged", width)

    def rms_norm(self, x: Value, weight: str, eps: float, *, unit_offset: bool) -> Value:
        tensor = self._tensor(x)
        scale = self._vector(weight, rank=3 if x.heads is None else 4, offset=float(unit_offset))
        normal = normalised(self._net, self._net.wide(tensor), eps)
        return self._like(x, self._net.narrow(self._net.binary(normal, scale, "PROD", "norm weight")), "normed")

    def gated_rms_norm(
        self, x: Value, gate: Value, weight: str, eps: float, *, groups: int, gate_first: bool
    ) -> Value:
        tensor, gate_tensor = self._program.tensors([x, gate])
        net = self._net
        wide, opening = net.wide(tensor), silu(net, gate_tensor)
        if gate_first:
            wide = net.binary(wide, opening, "PROD", "gate")
        normal = normalised(net, net.reshape(wide, (0, 0, groups, x.width // groups), "norm groups"), eps)
        if not gate_first:
            normal = net.binary(normal, self._vector(weight, rank=4), "PROD", "norm weight")
        out = net.reshape(normal, (0, 0, x.width), "merge groups")
        factor = self._vector(weight, rank=3) if gate_first else opening
        return self._like(x, net.narrow(net.binary(out, factor, "PROD", "gated norm")), "normed")

    def rope(self, x: Value, rotary_dim: int, theta: float) -> Value:
        assert x.heads is not None and not x.heads_first
        tensor, positions = self._program.tensors([x, self.inputs[POSITIONS]])
        first = self._net.transpose(tensor, (0, 2, 1, 3), "heads first")
        turned = rotary(self._net, first, positions, rotary_dim, theta, self._depth)
        return self._put_heads_first(turned, "turned", x.heads, x.width)

    def attention(self, q: Value, k: Value, v: Value, *, layer: int, shape: AttentionShape) -> Value:
        name = f"layer.{layer}.attention"
        q, k, v = (self._heads_first(x) for x in (q, k, v))
        query = self._tensor(q)
        scaled = scaled_query(self._net, query, name)
        q = self._put_heads_first(scaled, f"{name} query", shape.heads, shape.head_dim)
        self._program.cut(f"before {name}")
        position, positions = (self._tensor(self.inputs[n]) for n in (POSITION, POSITIONS))
        specs = kv_tensors(self._parameters.geometry, layer, self._depth, self._activation)
        keys, values = (self._updated(spec, new, position) for spec, new in zip(specs, (k, v), strict=True))
        out = attend(self._net, self._tensor(q), keys, values, positions, name)
        ordered = self._net.transpose(out, (0, 2, 1, 3), f"{name} tokens first")
        merged = self._put(self._net.reshape(ordered, (0, 0, shape.q_size), f"{name} merged"), name, shape.q_size)
        self._program.cut(name)
        return merged

    def causal_conv1d(self, x: Value, weight: str, bias: str | None, *, layer: int, kernel: int) -> Value:
        weights = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return self._native.run(CONV1D, layer, {"x": x}, weights, x.width, kernel)

    def mamba2(
        self, x: Value, k: Value, q: Value, dt: Value, *, layer: int, shape: SsmShape,
        a_log: str, d_skip: str, dt_bias: str,
    ) -> Value:  # fmt: skip
        tensor = self._tensor(dt)
        raw = self._net.wide(tensor)
        step = softplus(self._net, self._net.binary(raw, self._vector(dt_bias), "SUM", "dt bias"))
        name = self._program.put(step, f"layer.{layer}.dt", "float32", shape.heads)
        inputs = {"x": x, "k": k, "q": q, "dt": Value(name, 0, shape.heads)}
        return self._native.run(MAMBA2, layer, inputs, {"a_log": a_log, "skip": d_skip}, shape.inner, shape)

    def gdn(
        self, q: Value, k: Value, v: Value, a: Value, b: Value, *, layer: int, shape: SsmShape,
        a_log: str, dt_bias: str,
    ) -> Value:  # fmt: skip
        rate_in, beta_in = self._program.tensors([a, b])
        net = self._net
        step = softplus(net, net.binary(net.wide(rate_in), self._vector(dt_bias), "SUM", "dt bias"))
        rate = net.constant(f"-exp {a_log}", -np.exp(self._parameters.vector(a_log)), shape=(1, 1, shape.heads))
        decay = net.binary(step, rate, "PROD", "log decay")
        beta = net.activate(net.wide(beta_in), "SIGMOID", "beta")
        decay_name = self._program.put(decay, f"layer.{layer}.log_decay", "float32", shape.heads)
        beta_name = self._program.put(beta, f"layer.{layer}.beta", "float32", shape.heads)
        inputs = {
            "q": q, "k": k, "v": v, "log_decay": Value(decay_name, 0, shape.heads),
            "beta": Value(beta_name, 0, shape.heads),
        }  # fmt: skip
        return self._native.run(GDN, layer, inputs, {}, shape.inner, shape)

    def moe(self, x: Value, names: MoeNames, shape: MoeShape) -> Value:
        tensor, module = self._tensor(x), names.router.removesuffix(".weight")
        net = self._net
        table = dense_constant(net, names.router, self._dense(names.router), dtype="float32")
        logits = net.matmul_transposed(net.wide(tensor), table, module)
        scores = self._program.put(logits, f"{names.experts}.logits", "float32", shape.experts)
        inner = x if names.latent_in is None else self.linear(x, names.latent_in)
        shared = self._shared(x, names.shared, shape.gated)
        if names.shared_gate is not None:
            shared = self._scale(shared, self.sigmoid(self.linear(x, names.shared_gate)))
        inputs = {"x": inner, "logits": Value(scores, 0, shape.experts)}
        projections = ("gate_proj", "up_proj", "down_proj") if shape.gated else ("up_proj", "down_proj")
        weights = {p: f"{names.experts}.{p}" for p in projections}
        if names.router_bias is not None:
            weights["router_bias"] = names.router_bias
        routed = self._native.run(MOE, -1, inputs, weights, inner.width, shape)
        if names.latent_out is not None:
            routed = self.linear(routed, names.latent_out)
        both = self.add(routed, shared)
        return both if self._parallel.size == 1 else self._native.add_up(both)

    def select_tokens(self, x: Value) -> Value:
        tensor, index = self._program.tensors([x, self.inputs[TOKEN_INDEX]])
        gather = self._net.definition.add_gather(tensor, index, 1)
        gather.num_elementwise_dims = 1
        out = self._net.named(gather, "select tokens")
        name = self._program.put(out, "selected", self._activation, "B", "K", x.width, exact=True)
        return Value(name, 0, x.width)

    def _updated(self, spec: TensorSpec, new: Value, position: Any) -> Any:
        """A cache with the new keys or values written at `position`, in its own memory."""
        cache = self._tensor(self._program.declare(spec))
        updated = update_cache(self._net, cache, self._tensor(new), position, f"{spec.name} update")
        alias = TensorSpec(name=spec.name + ALIAS_SUFFIX, dtype=spec.dtype, dims=spec.dims)
        self._program.put_state(updated, alias)
        return updated

    def _shared(self, x: Value, prefix: str, gated: bool) -> Value:
        """The shared expert, of several ranks an addend."""
        up = self.linear(x, f"{prefix}.up_proj.weight")
        inner = self.mul(self.silu(self.linear(x, f"{prefix}.gate_proj.weight")), up) if gated else self.relu2(up)
        return self._product(inner, f"{prefix}.down_proj.weight")

    def _scale(self, x: Value, factor: Value) -> Value:
        """x [B, T, width] times factor [B, T, 1]."""
        scale, tensor = self._program.tensors([factor, x])
        return self._like(x, self._net.binary(scale, tensor, "PROD", "mul"), "product")

    def _tensor(self, value: Value) -> Any:
        return self._program.tensor(value)

    def _put(self, tensor: Any, hint: str, *channels: int) -> Value:
        name = self._program.put(tensor, hint, self._activation, *channels)
        return Value(name, 0, channels[-1], channels[0] if len(channels) == 2 else None)

    def _put_heads_first(self, tensor: Any, hint: str, heads: int, width: int) -> Value:
        name = self._program.put(tensor, hint, self._activation, "B", heads, "T", width)
        return Value(name, 0, width, heads, heads_first=True)

    def _like(self, x: Value, tensor: Any, hint: str) -> Value:
        if x.heads is None:
            return self._put(tensor, hint, x.width)
        if x.heads_first:
            return self._put_heads_first(tensor, hint, x.heads, x.width)
        return self._put(tensor, hint, x.heads, x.width)

    def _heads_first(self, x: Value) -> Value:
        if x.heads_first:
            return x
        assert x.heads is not None
        tensor = self._tensor(x)
        first = self._net.transpose(tensor, (0, 2, 1, 3), "heads first")
        return self._put_heads_first(first, "heads_first", x.heads, x.width)

    def _dense(self, name: str) -> DenseMatrix:
        matrix = self._parameters.matrix(name)
        assert isinstance(matrix, DenseMatrix), "embeddings and routers are never quantised"
        return matrix

    def _vector(self, name: str, *, rank: int = 3, offset: float = 0.0) -> Any:
        """A parameter vector, the last axis of `rank`; offset is added in float32."""
        values = self._parameters.vector(name) + np.float32(offset)
        return self._net.constant(f"{name} rank {rank}", values, shape=(1,) * (rank - 1) + values.shape)
