"""A stand-in for the full `tensorrt`: checks every use against its recorded bindings and works with the RTX ones.

Whatever the recorded version does not offer, or offers with other arguments, fails. Plugin layers, which RTX lacks, are
imitated: a plugin's own outputs become network inputs, its aliased outputs are its state inputs. Nothing is compiled.
No test here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_rtx

from trtllm_replayssm.builders.plugin_fields import NAMESPACE, PLUGINS, REAL_FIELDS, VERSION

SIGNATURES = Path(__file__).with_name("tensorrt_signatures.json")
SUBCLASSED = ("ILogger", "IProgressMonitor", "IStreamWriter")
ENGINE = b"not an engine: the full library is imitated"


@dataclass
class FakePlugin:
    """fields: what the creator was given; integers but for `REAL_FIELDS`."""

    name: str
    fields: dict[str, Any]


@dataclass
class PluginCall:
    """One plugin layer. inputs: tensors in argument order, valid while their network lives; names: theirs at the call;
    outputs: names of the network inputs that stand for its own outputs.
    """

    plugin: FakePlugin
    inputs: list[Any]
    names: list[str]
    outputs: list[str]


class FakePluginLayer:
    """The parts of IPluginV3Layer that a builder uses."""

    def __init__(self, outputs: list[Any]) -> None:
        self.name = ""
        self.metadata = ""
        self._outputs = outputs

    def get_output(self, index: int) -> Any:
        return self._outputs[index]


class Recorded:
    """The recorded bindings; calls: every plugin layer made; used: every (class, member) touched."""

    def __init__(self) -> None:
        self.data = json.loads(SIGNATURES.read_text(encoding="utf-8"))
        self.calls: list[PluginCall] = []
        self.used: set[tuple[str, str]] = set()

    def check(self, owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Raise unless a recorded signature takes these arguments -> its result type."""
        signatures = self.data["classes"][owner]["methods"].get(name)
        assert signatures, f"{owner}.{name} is not in tensorrt {self.data['version']}"
        for signature in signatures:
            parameters, result = _parse(signature)
            if self._fits(parameters[1:], args, kwargs):  # without self
                return result
        raise AssertionError(f"{owner}.{name}{(args, kwargs)}: recorded {signatures}")

    def _fits(self, parameters: list[tuple[str, str, bool]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) > len(parameters) or not set(kwargs) <= {name for name, _, _ in parameters[len(args) :]}:
            return False
        given = [*zip(parameters, args, strict=False), *((p, kwargs[p[0]]) for p in parameters if p[0] in kwargs)]
        required = {name for name, _, optional in parameters if not optional}
        return required <= {p[0] for p, _ in given} and all(self._is(value, p[1]) for p, value in given)

    def _is(self, value: Any, kind: str) -> bool:
        """Enumerations and objects of the library must be of the annotated kind; the rest converts by itself."""
        if kind in self.data["enums"]:
            return type(value).__name__ == kind
        if kind in self.data["classes"] and kind not in (*SUBCLASSED, "Weights"):
            return isinstance(value, Proxy) and (value.kind == kind or kind == "ILayer")
        return not isinstance(value, Proxy) or value.kind == kind


class Proxy:
    """One object of the library; reads, writes and calls are checked."""

    def __init__(self, recorded: Recorded, kind: str, real: Any) -> None:
        object.__setattr__(self, "recorded", recorded)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "real", real)

    def __getattr__(self, name: str) -> Any:
        members = self.recorded.data["classes"][self.kind]
        self.recorded.used.add((self.kind, name))
        if name in members["methods"]:
            return lambda *args, **kwargs: self._call(name, args, kwargs)
        assert name in members["attributes"], f"{self.kind}.{name} is not in tensorrt {self.recorded.data['version']}"
        return _wrap(self.recorded, getattr(self.real, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self.recorded.used.add((self.kind, name))
        assert name in self.recorded.data["classes"][self.kind]["attributes"], f"{self.kind}.{name} cannot be set"
        setattr(self.real, name, _unwrap(value))

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.recorded.check(self.kind, name, args, kwargs)
        if name == "add_plugin_v3":
            return self._add_plugin(*args)
        if name == "build_serialized_network_to_stream":
            return args[2].write(ENGINE) == len(ENGINE)
        answer = getattr(self.real, name)(*map(_unwrap, args), **{k: _unwrap(v) for k, v in kwargs.items()})
        if name == "add_dist_collective":  # the layer does not tell what it was asked for
            _, operation, reduce, root, groups = args
            answer.metadata = f"{operation.name} {reduce.name} {root} {groups}"
        return Proxy(self.recorded, result, answer) if result in self.recorded.data["classes"] else answer

    def _add_plugin(self, inputs: list[Proxy], shape_inputs: list[Any], plugin: Proxy) -> Proxy:
        assert not shape_inputs
        network, fake = self.real, plugin.real
        spec, real = PLUGINS[fake.name], [tensor.real for tensor in inputs]
        own = len(spec.data) + len(spec.rows) + len(spec.cursors) + len(spec.weights)
        number = len(self.recorded.calls)
        outputs = [
            network.add_input(f"plugin {number} {name}", _output_type(name, real[0]), (-1, -1, _width(fake)))
            for name in spec.outputs
        ]
        names = [tensor.name for tensor in outputs]
        self.recorded.calls.append(PluginCall(fake, real, [tensor.name for tensor in real], names))
        state = real[own:] if fake.name != "MoeExperts" else []
        outputs += [network.add_identity(tensor).get_output(0) for tensor in state]
        return Proxy(self.recorded, "IPluginV3Layer", FakePluginLayer(outputs))


def _output_type(name: str, first: Any) -> Any:
    """Of a plugin's own output; first: its first input."""
    return {"ids": tensorrt_rtx.DataType.INT32, "weights": tensorrt_rtx.DataType.FLOAT}.get(name, first.dtype)


def _width(plugin: FakePlugin) -> int:
    """Channels of a plugin's own outputs."""
    fields = plugin.fields
    if plugin.name == "MoeRoute":
        return int(fields["top_k"])
    return int(fields.get("width") or fields.get("channels") or fields["heads"] * fields["head_dim"])


class FakeCreator:
    """A creator of the plugin library: takes exactly its fields, as arrays of one element."""

    def __init__(self, recorded: Recorded, name: str) -> None:
        self._recorded = recorded
        self._name = name

    def create_plugin(self, name: str, collection: list[tuple[str, Any, Any]], phase: Any) -> Proxy:
        (signature,) = self._recorded.data["classes"]["IPluginCreatorV3One"]["methods"]["create_plugin"]
        assert [p[0] for p in _parse(signature)[0]] == ["self", "name", "field_collection", "phase"]
        assert phase.name == "BUILD"
        fields: dict[str, Any] = {}
        for field, values, kind in collection:
            expected = (np.float32, "FLOAT32") if field in REAL_FIELDS else (np.int32, "INT32")
            assert (values.dtype, kind.name) == expected and values.shape == (1,)
            assert field not in fields
            fields[field] = values[0].item()
        assert list(fields) == list(PLUGINS[self._name].all_fields)
        return Proxy(self._recorded, "IPluginV3", FakePlugin(self._name, fields))


class FakeRegistry:
    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def get_creator(self, *args: str) -> FakeCreator | None:
        self._recorded.check("IPluginRegistry", "get_creator", args, {})
        name, version, namespace = args
        known = name in PLUGINS and (version, namespace) == (VERSION, NAMESPACE)
        return FakeCreator(self._recorded, name) if known else None


class RecordedTensorRt:
    """The module `tensorrt`."""

    __name__ = "tensorrt"
    __spec__ = None

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self.__version__ = recorded.data["version"]

    def __getattr__(self, name: str) -> Any:
        recorded = self._recorded
        if name in recorded.data["enums"]:
            return _Enum(recorded, name)
        if name == "get_plugin_registry":
            assert name in recorded.data["functions"]
            return lambda: FakeRegistry(recorded)
        assert name in recorded.data["classes"], f"{name} is not in tensorrt {recorded.data['version']}"
        if name in SUBCLASSED or name == "Weights":
            return getattr(tensorrt_rtx, name)
        if name == "PluginField":
            return self._plugin_field
        if name == "PluginFieldCollection":
            return list

        def construct(*args: Any) -> Proxy:
            recorded.check(name, "__init__", args, {})
            return Proxy(recorded, name, getattr(tensorrt_rtx, name)(*map(_unwrap, args)))

        return construct

    def _plugin_field(self, *args: Any) -> tuple[Any, ...]:
        self._recorded.check("PluginField", "__init__", args, {})
        return args


class _Enum:
    def __init__(self, recorded: Recorded, name: str) -> None:
        self._members = recorded.data["enums"][name]
        self._name = name

    def __getattr__(self, member: str) -> Any:
        assert member in self._members, f"{self._name}.{member} is not in the recorded version"
        return getattr(getattr(tensorrt_rtx, self._name), member)


def _parse(signature: str) -> tuple[list[tuple[str, str, bool]], str]:
    """`f(a: A, b: B = 0) -> R` -> ([(name, type, optional)], R)."""
    match = re.fullmatch(r"\w+\((.*)\) -> (.*)", signature)
    assert match is not None, signature
    parameters = []
    for part in re.split(r", (?=\w+(?::|$))", match[1]):
        name, _, rest = part.partition(": ")
        kind, default, _ = rest.partition(" = ")
        parameters.append((name, kind, bool(default)))
    return [p for p in parameters if p[0]], match[2]


def _wrap(recorded: Recorded, value: Any) -> Any:
    kind = type(value).__name__
    return Proxy(recorded, kind, value) if kind in recorded.data["classes"] else value


def _unwrap(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrap(v) for v in value)
    return value.real if isinstance(value, Proxy) else value
