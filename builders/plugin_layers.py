"""Native operations as plugin layers inside the network (flavour `tensorrt`), filled from `plugin_fields`.

State tensors are network inputs and outputs of the same memory. HAZARD: TensorRT copies a tensor that two plugins alias
or that anything else reads; each state tensor therefore belongs to one layer's plugin alone, which compares
the pointers when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.bindings import (
    ALIAS_SUFFIX,
    COMMIT,
    CONV1D,
    GDN,
    MOE,
    Program,
    TensorSpec,
    cursor_tensors,
    ssm_tensors,
    step_inputs,
    window_tensor,
)
from trtllm_replayssm.builders.collectives import all_gather_last, all_reduce
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import Parameters
from trtllm_replayssm.builders.plugin_fields import (
    ACTIVATION_CODES,
    LIBRARY,
    NAMESPACE,
    PLUGINS,
    REAL_FIELDS,
    ROUNDING_CODES,
    ROUTER_CODES,
    STATE_FORMAT_CODES,
    VERSION,
    WEIGHT_FORMAT_CODES,
)
from trtllm_replayssm.builders.segments import ProgramBuilder, Value
from trtllm_replayssm.errors import ConfigError, UnsupportedError
from trtllm_replayssm.shapes import MoeShape, Router, SsmShape
from trtllm_replayssm.weights.expert_tensors import expert_tensors
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.names import split_expert_stack


class PluginOps:
    """Implements `NativeOps` with plugins of the registry that `library` (if given) was loaded into."""

    def __init__(self, program: ProgramBuilder, parameters: Parameters, options: BuildOptions, trt: Any) -> None:
        self._program = program
        self._parameters = parameters
        self._options = options
        self._trt = trt
        self._activation = options.activation.value

    def run(
        self, op: str, layer: int, inputs: dict[str, Value], weights: dict[str, str], width: int, shape: Any
    ) -> Value:
        """See `NativeOps`. Raises UnsupportedError for experts of one of several ranks."""
        if op == MOE:
            self._require_all_experts()
        name = f"{split_expert_stack(weights['up_proj'])[0]} {op}" if op == MOE else f"layer.{layer}.{op}"
        spec = PLUGINS[op]
        fields = {**self._fields(op, layer, shape, weights), **{f"{k}_offset": inputs[k].start for k in spec.data}}
        state = self._state(op, layer, shape)
        tensors = [self._whole(inputs[k].name) for k in spec.data]
        tensors += [self._whole(k) for k in (*spec.rows, *self._cursors(spec.cursors))]
        tensors += [self._constant(f"{name} {k}", v) for k, v in self._weights(op, weights, width).items()]
        tensors += self._experts(weights, shape) if op == MOE else []
        tensors += [self._program.tensor(self._program.declare(s)) for s in state]
        plugin_layer = self._add(op, name, fields, tensors)
        for i, s in enumerate(state):
            alias = TensorSpec(name=s.name + ALIAS_SUFFIX, dtype=s.dtype, dims=s.dims)
            self._program.put_state(plugin_layer.get_output(1 + i), alias)
        return Value(self._program.put(plugin_layer.get_output(0), name, self._activation, width), 0, width)

    def add_up(self, x: Value) -> Value:
        """See `NativeOps`."""
        addend = self._program.tensor(x)
        total = all_reduce(self._program.network, addend, self._parameters.parallel.size, "sum over ranks")
        return Value(self._program.put(total, "sum over ranks", self._activation, x.width), 0, x.width)

    def join(self, x: Value, name: str, width: int) -> Value:
        """See `NativeOps`."""
        own = self._program.tensor(x)
        whole = all_gather_last(self._program.network, own, self._parameters.parallel.size, "join ranks")
        return Value(self._program.put(whole, name, "float32", "B", "K", width, exact=True), 0, width)

    def commit(self) -> Program:
        """The program that moves the cursors after a step: one plugin over the rows and the cursors."""
        # a network of its own: the stream orders it after the step, whose hidden states it is given
        hidden = TensorSpec(name="after", dtype=self._activation, dims=("B", "T", self._parameters.geometry.hidden))
        given = step_inputs(self._parameters.geometry, self._activation) | {
            "after": hidden, "accepted": TensorSpec(name="accepted", dtype="int32", dims=("B",)),
        }  # fmt: skip
        rows = [given[name] for name in PLUGINS[COMMIT].rows]
        cursors = [spec for spec in cursor_tensors() if spec.name != "seed"]
        tensors = [self._program.tensor(self._program.declare(s)) for s in (*rows, *cursors)]
        replay = self._options.replay
        fields = {"window": replay.window, "max_step_tokens": replay.max_step_tokens}
        layer = self._add(COMMIT, COMMIT, fields, tensors)
        for i, s in enumerate(cursors):
            alias = TensorSpec(name=s.name + ALIAS_SUFFIX, dtype=s.dtype, dims=s.dims)
            self._program.put_state(layer.get_output(i), alias)
        return self._program.finish({})

    def _add(self, op: str, name: str, fields: Mapping[str, float], tensors: list[Any]) -> Any:
        trt = self._trt
        creator = trt.get_plugin_registry().get_creator(op, VERSION, NAMESPACE)
        if creator is None:
            raise ConfigError(
                "build", "plugin_library", expected=f"a library that registers {NAMESPACE}::{op} version {VERSION}",
                got="no such creator", hint=f"Give the path of {LIBRARY} with --plugin-library",
            )  # fmt: skip
        kinds = {np.int32: trt.PluginFieldType.INT32, np.float32: trt.PluginFieldType.FLOAT32}
        types = {k: np.float32 if k in REAL_FIELDS else np.int32 for k in PLUGINS[op].all_fields}
        values = {k: np.array([fields[k]], dtype=kind) for k, kind in types.items()}
        collection = trt.PluginFieldCollection([trt.PluginField(k, v, kinds[types[k]]) for k, v in values.items()])
        plugin = creator.create_plugin(name, collection, trt.TensorRTPhase.BUILD)
        if plugin is None:
            raise ConfigError(
                "build", "plugin_library", expected=f"a {op} plugin for {dict(fields)}", got="none",
                hint="The library's message above says which field it refuses",
            )  # fmt: skip
        layer = self._program.network.definition.add_plugin_v3(tensors, [], plugin)
        self._program.network.named(layer, name)
        return layer

    def _whole(self, name: str) -> Any:
        return self._program.tensor(Value(name, 0, 0))

    def _cursors(self, names: tuple[str, ...]) -> tuple[str, ...]:
        for spec in cursor_tensors():
            self._program.declare(spec)
        return names

    def _constant(self, name: str, array: NDArray[np.float32]) -> Any:
        return self._program.network.constant(name, array, shape=array.shape)

    def _fields(self, op: str, layer: int, shape: Any, weights: Mapping[str, str]) -> dict[str, float]:
        replay, activation = self._options.replay, ACTIVATION_CODES[self._options.activation]
        if op == MOE:
            assert isinstance(shape, MoeShape)
            up = self._parameters.experts(weights["up_proj"]).shape
            return {
                "experts": shape.experts, "top_k": shape.top_k, "width": up[2], "intermediate": up[1],
                "gated": int(shape.gated), "activation": activation,
                "weight_format": WEIGHT_FORMAT_CODES[self._expert_format(weights)],
                "router": ROUTER_CODES[shape.router], "norm_topk": int(shape.norm_topk), "scaling": shape.scaling,
                "groups": 1 if shape.router is Router.SOFTMAX else shape.n_group,
                "topk_group": 1 if shape.router is Router.SOFTMAX else shape.topk_group,
            }  # fmt: skip
        step = {"max_step_tokens": replay.max_step_tokens, "layer": layer, "activation": activation}
        if op == CONV1D:
            return {"channels": self._parameters.geometry.ssm.conv_channels, "kernel": int(shape), **step}
        assert isinstance(shape, SsmShape)
        return {
            "heads": shape.heads, "groups": shape.groups, "head_dim": shape.head_dim, "state_dim": shape.state_dim,
            "window": replay.window, "recurrence": STATE_FORMAT_CODES[replay.recurrence],
            "rounding": ROUNDING_CODES[replay.recurrence_rounding], "read": STATE_FORMAT_CODES[replay.read],
            "head_offset": shape.first_head, **step,
        }  # fmt: skip

    def _state(self, op: str, layer: int, shape: Any) -> list[TensorSpec]:
        if op == MOE:
            return []
        if op == CONV1D:
            return [window_tensor(self._parameters.geometry, self._options.replay, layer, self._activation)]
        return ssm_tensors(shape, self._options.replay, layer, self._activation)

    def _weights(self, op: str, weights: Mapping[str, str], width: int) -> dict[str, NDArray[np.float32]]:
        read = self._parameters.vector
        if op == GDN:
            return {}
        if op == MOE:
            none = np.zeros(self._parameters.experts(weights["up_proj"]).shape[0], dtype=np.float32)
            return {"router_bias": read(weights["router_bias"]) if "router_bias" in weights else none}
        if op == CONV1D:
            bias = read(weights["bias"]) if "bias" in weights else np.zeros(width, dtype=np.float32)
            return {"weight": read(weights["weight"]), "bias": bias}
        return {"a": -np.exp(read(weights["a_log"])), "skip": read(weights["skip"])}

    def _require_all_experts(self) -> None:
        if self._parameters.parallel.size > 1:
            raise UnsupportedError(
                "build", "tp_size", expected=f"1 for a model with routed experts: {MOE} counts them from 0",
                got=self._parameters.parallel.size,
                hint="Use --flavour tensorrt_rtx, or run the checkpoint itself with tensor_parallel_size",
            )  # fmt: skip

    def _expert_format(self, weights: Mapping[str, str]) -> MatrixFormat:
        formats = {self._parameters.format_of(stack) for key, stack in weights.items() if key != "router_bias"}
        if len(formats) > 1:
            got = sorted(f.value for f in formats)
            raise UnsupportedError("build", "experts", expected="one format for all projections of a block", got=got)
        return formats.pop()

    def _experts(self, weights: Mapping[str, str], shape: MoeShape) -> list[Any]:
        """Network inputs for the bytes of the experts: gigabytes that never become constants."""
        stack = weights["up_proj"]
        experts, inner, width = self._parameters.experts(stack).shape
        prefix, _ = split_expert_stack(stack)
        specs = expert_tensors(prefix, self._expert_format(weights), experts, width, inner, gated=shape.gated)
        return [self._program.tensor(self._program.declare(spec)) for spec in specs]
