"""Native operations as plugin layers inside the network (flavour `tensorrt`), filled from `plugin_fields`.

State tensors are network inputs and outputs of the same memory. HAZARD: TensorRT copies a tensor that two plugins alias
or that anything else reads; each state tensor therefore belongs to one layer's plugin alone, which compares
the pointers when it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.bindings import (
    ALIAS_SUFFIX,
    COMMIT,
    CONV1D,
    GDN,
    MOE,
    ROUTE,
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
        """See `NativeOps`."""
        if op == MOE:
            return self._moe(inputs, weights, width, shape)
        name, state = f"layer.{layer}.{op}", self._state(op, layer, shape)
        constants = self._weights(op, weights, width)
        plugin_layer = self._operation(op, name, self._fields(op, layer, shape), inputs, constants, state)
        for i, s in enumerate(state):
            alias = TensorSpec(name=s.name + ALIAS_SUFFIX, dtype=s.dtype, dims=s.dims)
            self._program.put_state(plugin_layer.get_output(1 + i), alias)
        return Value(self._program.put(plugin_layer.get_output(0), name, self._activation, width), 0, width)

    def _moe(self, inputs: Mapping[str, Value], weights: Mapping[str, str], width: int, shape: MoeShape) -> Value:
        """Routing over all experts, then those that are here: their bytes are inputs, and never become constants."""
        block, _ = split_expert_stack(weights["up_proj"])
        experts, inner, hidden = self._parameters.experts(weights["up_proj"]).shape
        fmt, name = self._expert_format(weights), f"{block} {MOE}"
        fields = {
            "experts": experts, "top_k": shape.top_k, "width": hidden, "intermediate": inner,
            "gated": int(shape.gated), "weight_format": WEIGHT_FORMAT_CODES[fmt],
            "activation": ACTIVATION_CODES[self._options.activation],
        }  # fmt: skip
        chosen = self._route(f"{block} {ROUTE}", inputs["logits"], weights, shape)
        packed = expert_tensors(block, fmt, experts, hidden, inner, gated=shape.gated)
        layer = self._operation(MOE, name, fields, {"x": inputs["x"], **chosen}, {}, packed)
        return Value(self._program.put(layer.get_output(0), name, self._activation, width), 0, width)

    def _route(self, name: str, logits: Value, weights: Mapping[str, str], shape: MoeShape) -> dict[str, Value]:
        """The chosen experts [B, T, top_k], counted from the first that is here, and their weights."""
        softmax = shape.router is Router.SOFTMAX
        fields = {
            "experts": shape.experts, "top_k": shape.top_k, "router": ROUTER_CODES[shape.router],
            "groups": 1 if softmax else shape.n_group, "topk_group": 1 if softmax else shape.topk_group,
            "norm_topk": int(shape.norm_topk), "scaling": shape.scaling,
        }  # fmt: skip
        none = np.zeros(shape.experts, dtype=np.float32)
        bias = self._parameters.vector(weights["router_bias"]) if "router_bias" in weights else none
        layer = self._operation(ROUTE, name, fields, {"logits": logits}, {"router_bias": bias}, ())
        ids, chosen_weights = (layer.get_output(i) for i in range(2))
        first = self._parameters.parallel.units(shape.experts).start
        if first > 0:
            # of others' experts the numbers end up outside 0 .. experts - 1, which is no work
            net = self._program.network
            offset = net.constant(f"int32 {first}", np.full((1, 1, 1), first, dtype=np.int32), shape=(1, 1, 1))
            ids = net.binary(ids, offset, "SUB", f"{name} own ids")
        put, k = self._program.put, shape.top_k
        return {
            "ids": Value(put(ids, f"{name} ids", "int32", k), 0, k),
            "weights": Value(put(chosen_weights, f"{name} weights", "float32", k), 0, k),
        }  # fmt: skip

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

    def _operation(
        self, op: str, name: str, fields: Mapping[str, float], inputs: Mapping[str, Value],
        constants: Mapping[str, NDArray[np.float32]], given: Iterable[TensorSpec],
    ) -> Any:  # fmt: skip
        """The layer of a plugin. constants: its weights; given: its inputs from outside, experts or state."""
        spec = PLUGINS[op]
        tensors = [self._whole(inputs[k].name) for k in spec.data]
        tensors += [self._whole(k) for k in (*spec.rows, *self._cursors(spec.cursors))]
        tensors += [self._constant(f"{name} {k}", v) for k, v in constants.items()]
        tensors += [self._program.tensor(self._program.declare(s)) for s in given]
        return self._add(op, name, {**fields, **{f"{k}_offset": inputs[k].start for k in spec.data}}, tensors)

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

    def _fields(self, op: str, layer: int, shape: Any) -> dict[str, float]:
        replay, activation = self._options.replay, ACTIVATION_CODES[self._options.activation]
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
        if op == CONV1D:
            return [window_tensor(self._parameters.geometry, self._options.replay, layer, self._activation)]
        return ssm_tensors(shape, self._options.replay, layer, self._activation)

    def _weights(self, op: str, weights: Mapping[str, str], width: int) -> dict[str, NDArray[np.float32]]:
        read = self._parameters.vector
        if op == GDN:
            return {}
        if op == CONV1D:
            bias = read(weights["bias"]) if "bias" in weights else np.zeros(width, dtype=np.float32)
            return {"weight": read(weights["weight"]), "bias": bias}
        return {"a": -np.exp(read(weights["a_log"])), "skip": read(weights["skip"])}

    def _expert_format(self, weights: Mapping[str, str]) -> MatrixFormat:
        formats = {self._parameters.format_of(stack) for key, stack in weights.items() if key != "router_bias"}
        if len(formats) > 1:
            got = sorted(f.value for f in formats)
            raise UnsupportedError("build", "experts", expected="one format for all projections of a block", got=got)
        return formats.pop()
