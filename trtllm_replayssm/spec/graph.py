"""The numpy float64 interpreter of the graph vocabulary: whole models, one sequence, tensors [tokens, channels]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.graph import MoeNames
from trtllm_replayssm.shapes import AttentionShape, MoeShape, SsmShape
from trtllm_replayssm.spec import layers, ssm
from trtllm_replayssm.spec.conv1d import conv_prefill
from trtllm_replayssm.spec.cursors import Cursors, commit, finish_prefill
from trtllm_replayssm.spec.replay import ReplayLayer, StepInputs, as_float32

Array = NDArray[np.float64]


class Weights(Protocol):
    """Where parameters come from; `weights.checkpoint.Checkpoint` is one."""

    def matrix(self, name: str) -> Any:
        """A matrix with `.dequantize(dtype)`."""
        ...

    def vector(self, name: str) -> NDArray[np.float32]:
        """A vector parameter."""
        ...

    def experts(self, name: str) -> Any:
        """A stack with `.matrix(expert)`."""
        ...


class StepKind(Enum):
    """What the tokens of a forward pass are: a decode step, or a chunk of a prompt (the last one rounds the state)."""

    DECODE = "decode"
    PROMPT = "prompt"
    PROMPT_END = "prompt_end"


@dataclass
class SequenceState:
    """Everything one sequence remembers: KV, convolution windows, recurrent state by layer, and its cursors.

    replay=None keeps the state conventionally (read, update, write for every token), whatever `kind` says.
    kind: what the next forward pass is. exact: see `ReplayLayer`.
    """

    replay: ReplayConfig | None = None
    exact: bool = False
    kind: StepKind = StepKind.DECODE
    cursors: Cursors = field(default_factory=Cursors)
    kv: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    windows: dict[int, Array] = field(default_factory=dict)
    states: dict[int, Array] = field(default_factory=dict)
    replay_layers: dict[int, ReplayLayer] = field(default_factory=dict)

    def commit(self, num_tokens: int, accepted: int | None = None) -> None:
        """End the last forward pass of num_tokens; `accepted` of them stay (None: all).

        Raises ContractError when tokens of a conventional state or of a prompt are to be rolled back.
        """
        keep = num_tokens if accepted is None else accepted
        if self.replay is not None and self.kind is StepKind.DECODE:
            commit(self.replay, self.cursors, num_tokens, keep)
            return
        if keep != num_tokens:
            raise ContractError("commit", "accepted", expected=f"all {num_tokens} tokens", got=keep)
        if self.replay is None:
            self.cursors.position += num_tokens
        else:
            finish_prefill(self.cursors, num_tokens)


class NumpyGraph:
    """Implements `graph.Graph` for arrays; `state` is advanced by the stateful operations, `commit` ends a step."""

    def __init__(self, weights: Weights, state: SequenceState) -> None:
        self._weights = weights
        self._state = state
        self._cache: dict[str, Array] = {}

    def embedding(self, ids: NDArray[Any], table: str) -> Array:
        return np.asarray(self._matrix(table)[ids])

    def linear(self, x: Array, weight: str) -> Array:
        return np.asarray(x @ self._matrix(weight).T)

    def lm_head(self, x: Array, weight: str) -> Array:
        return self.linear(x, weight)

    def add(self, a: Array, b: Array) -> Array:
        return a + b

    def mul(self, a: Array, b: Array) -> Array:
        return a * b

    def silu(self, x: Array) -> Array:
        return ssm.silu(x)

    def sigmoid(self, x: Array) -> Array:
        return ssm.sigmoid(x)

    def relu2(self, x: Array) -> Array:
        return np.asarray(np.maximum(x, 0.0) ** 2)

    def concat(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts, axis=-1)

    def split(self, x: Array, sizes: Sequence[int]) -> list[Array]:
        return np.split(x, np.cumsum(sizes)[:-1], axis=-1)

    def split_heads(self, x: Array, heads: int) -> Array:
        return x.reshape(*x.shape[:-1], heads, -1)

    def merge_heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-2], -1)

    def rms_norm(self, x: Array, weight: str, eps: float, *, unit_offset: bool) -> Array:
        return layers.rms_norm(x, self._vector(weight) + float(unit_offset), eps)

    def gated_rms_norm(
        self, x: Array, gate: Array, weight: str, eps: float, *, groups: int, gate_first: bool
    ) -> Array:
        return layers.gated_rms_norm(x, gate, self._vector(weight), eps, groups=groups, gate_first=gate_first)

    def rope(self, x: Array, rotary_dim: int, theta: float) -> Array:
        positions = np.arange(len(x), dtype=np.float64) + self._state.cursors.position
        return layers.rope(x, positions, rotary_dim, theta)

    def attention(self, q: Array, k: Array, v: Array, *, layer: int, shape: AttentionShape) -> Array:
        position = self._state.cursors.position
        keys, values = self._state.kv.get(layer, (k[:0], v[:0]))
        keys = np.concatenate([keys[:position], k])
        values = np.concatenate([values[:position], v])
        self._state.kv[layer] = (keys, values)
        return self.merge_heads(layers.attention(q, keys, values))

    def causal_conv1d(self, x: Array, weight: str, bias: str | None, *, layer: int, kernel: int) -> Array:
        rows = kernel if self._state.replay is None else self._state.replay.conv_rows(kernel)
        window = self._state.windows.setdefault(layer, np.zeros((rows, x.shape[-1])))
        return conv_prefill(
            window, self._state.cursors.position, x, self._vector(weight), None if bias is None else self._vector(bias)
        )

    def mamba2(
        self, x: Array, k: Array, q: Array, dt: Array, *, layer: int, shape: SsmShape,
        a_log: str, d_skip: str, dt_bias: str,
    ) -> Array:  # fmt: skip
        x, k, q = self.split_heads(x, shape.heads), self.split_heads(k, shape.groups), self.split_heads(q, shape.groups)
        dt = ssm.softplus(dt + self._vector(dt_bias))
        a = -np.exp(self._vector(a_log))
        if self._state.replay is not None:
            dt = dt if self._state.exact else as_float32(dt)
            out = self._replay_step(layer, shape, StepInputs(k, q, x, dt * a, dt=dt))
        else:
            out = np.zeros_like(x)
            state = self._conventional(layer, shape)
            for t in range(len(x)):
                out[t], state = ssm.mamba2_step(shape, state, x[t], k[t], q[t], dt[t], a)
            self._state.states[layer] = state
        return self.merge_heads(out + self._vector(d_skip)[:, None] * x)

    def gdn(
        self, q: Array, k: Array, v: Array, a: Array, b: Array, *, layer: int, shape: SsmShape,
        a_log: str, dt_bias: str,
    ) -> Array:  # fmt: skip
        q, k, v = self.split_heads(q, shape.groups), self.split_heads(k, shape.groups), self.split_heads(v, shape.heads)
        beta = ssm.sigmoid(b)
        g = -np.exp(self._vector(a_log)) * ssm.softplus(a + self._vector(dt_bias))
        if self._state.replay is not None:
            out = self._replay_step(layer, shape, StepInputs(k, q, v, g, beta=beta))
        else:
            out = np.zeros_like(v)
            state = self._conventional(layer, shape)
            for t in range(len(v)):
                out[t], state = ssm.gdn_step(shape, state, k[t], q[t], v[t], g[t], beta[t])
            self._state.states[layer] = state
        return self.merge_heads(out)

    def moe(self, x: Array, names: MoeNames, shape: MoeShape) -> Array:
        bias = None if names.router_bias is None else self._vector(names.router_bias)
        ids, weights = layers.route(self.linear(x, names.router), bias, shape)
        inner = x if names.latent_in is None else self.linear(x, names.latent_in)
        routed = np.zeros_like(inner)
        for t in range(len(x)):
            for expert, weight in zip(ids[t], weights[t], strict=True):
                routed[t] += weight * self._expert(inner[t], names.experts, int(expert), shape.gated)
        if names.latent_out is not None:
            routed = self.linear(routed, names.latent_out)
        shared = self._shared(x, names.shared, shape.gated)
        if names.shared_gate is not None:
            shared = ssm.sigmoid(self.linear(x, names.shared_gate)) * shared
        return routed + shared

    def select_tokens(self, x: Array) -> Array:
        return x

    def _expert(self, x: Array, prefix: str, expert: int, gated: bool) -> Array:
        def times(projection: str, value: Array) -> Array:
            key = f"{prefix}.{projection}#{expert}"
            if key not in self._cache:
                matrix = self._weights.experts(f"{prefix}.{projection}").matrix(expert)
                self._cache[key] = np.asarray(matrix.dequantize(np.float64))
            return np.asarray(value @ self._cache[key].T)

        up = times("up_proj", x)
        return times("down_proj", ssm.silu(times("gate_proj", x)) * up if gated else self.relu2(up))

    def _shared(self, x: Array, prefix: str, gated: bool) -> Array:
        up = self.linear(x, f"{prefix}.up_proj.weight")
        inner = ssm.silu(self.linear(x, f"{prefix}.gate_proj.weight")) * up if gated else self.relu2(up)
        return self.linear(inner, f"{prefix}.down_proj.weight")

    def _replay_step(self, layer: int, shape: SsmShape, inputs: StepInputs) -> Array:
        config = self._state.replay
        assert config is not None
        if layer not in self._state.replay_layers:
            self._state.replay_layers[layer] = ReplayLayer(shape, config, layer, self._state.exact)
        replay_layer = self._state.replay_layers[layer]
        if self._state.kind is StepKind.DECODE:
            return replay_layer.step(self._state.cursors, inputs)
        return replay_layer.prefill(self._state.cursors, inputs, last=self._state.kind is StepKind.PROMPT_END)

    def _conventional(self, layer: int, shape: SsmShape) -> Array:
        zeros = np.zeros((shape.heads, shape.head_dim, shape.state_dim))
        return self._state.states.get(layer, zeros)

    def _matrix(self, name: str) -> Array:
        if name not in self._cache:
            self._cache[name] = np.asarray(self._weights.matrix(name).dequantize(np.float64))
        return self._cache[name]

    def _vector(self, name: str) -> Array:
        if name not in self._cache:
            self._cache[name] = self._weights.vector(name).astype(np.float64)
        return self._cache[name]
