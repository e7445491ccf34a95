"""Turns one pass of a model over the TensorRT interpreter into a program: networks, and native operations between them.

A network is given away (`emit`) as soon as it ends, so that only one lives at a time. What it must mark as output is
known only when later parts have been traced; so a model runs twice, first with a `Needs` that collects the names that
cross a cut (weights are then untouched zero pages), then for real.

A native operation does not cut at once: layers that do not need its output still join the network before it, so that a
recurrent layer's projections, gates and decays are one engine. The cut comes when a layer asks for the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtllm_replayssm.bindings import EngineStep, OpStep, Program, TensorSpec, View
from trtllm_replayssm.builders.network import Network
from trtllm_replayssm.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Value:
    """A handle of the interpreter: channels [start, start + width) of the last axis of the program tensor `name`.

    heads: None for [B, T, width]; else [B, T, heads, width], or [B, heads, T, width] when heads_first.
    """

    name: str
    start: int
    width: int
    heads: int | None = None
    heads_first: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One finished network of a program; label says what it holds.

    share: segments of an equal one are the same engine.
    """

    program: str
    label: str
    network: Network
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    share: str | None


@dataclass
class Needs:
    """Names of tensors that some later network, native operation or caller reads."""

    names: set[str] = field(default_factory=set)


class ProgramBuilder:
    """Collects a program. new_network() starts a network; emit(segment) takes a finished one -> name of its engine."""

    def __init__(
        self, name: str, new_network: Callable[[], Network], emit: Callable[[Segment], str], needs: Needs, *,
        segmented: bool,
    ) -> None:  # fmt: skip
        self._name = name
        self._new_network = new_network
        self._emit = emit
        self._needs = needs
        self.segmented = segmented
        self._specs: dict[str, TensorSpec] = {}
        self._steps: list[EngineStep | OpStep] = []
        self._crossing: dict[str, TensorSpec] = {}
        self._counts: dict[str, int] = {}
        self._waiting: list[OpStep] = []
        self._open()

    def _open(self) -> None:
        self._network: Network | None = None
        self._live: dict[str, Any] = {}
        self._slices: dict[tuple[str, int, int], Any] = {}
        self._inputs: dict[str, TensorSpec] = {}
        self._produced: list[str] = []
        self._always: dict[str, tuple[Any, TensorSpec]] = {}

    @property
    def network(self) -> Network:
        """The network under construction, started when first asked for."""
        if self._network is None:
            self._network = self._new_network()
        return self._network

    def declare(self, spec: TensorSpec) -> Value:
        """A tensor that comes from outside: an input of the step, a state."""
        self._specs[spec.name] = spec
        last = spec.dims[-1]
        return Value(spec.name, 0, last if isinstance(last, int) else 0)

    def tensors(self, values: Sequence[Value]) -> list[Any]:
        """The library's tensors of values in one network, the current one from now on: cuts first where it must.

        HAZARD: ask for all operands of a layer at once, and for `network` after that.
        """
        waiting = {name for step in self._waiting for name in step.outputs.values()}
        if any(value.name in waiting for value in values):
            self.cut("before " + " and ".join(step.outputs["out"] for step in self._waiting))
        return [self._tensor(value) for value in values]

    def tensor(self, value: Value) -> Any:
        """As `tensors`, of one value; a slice where the value is a part."""
        return self.tensors([value])[0]

    def _tensor(self, value: Value) -> Any:
        spec = self._specs[value.name]
        whole = self._whole(spec)
        if value.width in (0, spec.dims[-1]):
            return whole
        key = (value.name, value.start, value.width)
        if key not in self._slices:
            name = f"{value.name}[{value.start}:{value.start + value.width}]"
            self._slices[key] = self.network.slice_last(whole, value.start, value.width, name)
        return self._slices[key]

    def _whole(self, spec: TensorSpec) -> Any:
        if spec.name not in self._live:
            self._live[spec.name] = self.network.input(spec)
            self._inputs[spec.name] = spec
            self._crosses(spec)
        return self._live[spec.name]

    def put(self, tensor: Any, hint: str, dtype: str, *channels: int | str, exact: bool = False) -> str:
        """Register a tensor of the current network -> its program name, unique unless `exact`.

        channels: its extents after [B, T], or all of them when they start with "B".
        """
        name = hint if exact else self._unique(hint)
        if name in self._specs:
            raise InvariantError("build program", name, expected="a new tensor", got="one of the same name")
        dims = channels if channels[:1] == ("B",) else ("B", "T", *channels)
        self._specs[name] = TensorSpec(name=name, dtype=dtype, dims=dims)
        self._live[name] = tensor
        self._produced.append(name)
        return name

    def put_state(self, tensor: Any, spec: TensorSpec) -> None:
        """An output of the current network that is always wanted: a state updated in place."""
        self._always[spec.name] = (tensor, spec)

    def keep(self, name: str) -> None:
        """Mark a tensor as read by somebody: it becomes an output of its network."""
        self._crosses(self._specs[name])

    def native(
        self, op: str, layer: int, inputs: dict[str, Value], weights: dict[str, str], out: TensorSpec
    ) -> Value:
        """Run a native operation behind the current network -> its output `out`, for later networks.

        layer: -1 for an operation without state. out: its name is made unique.
        """
        for value in inputs.values():
            self._crosses(self._specs[value.name])
        name = self._unique(out.name)
        self._specs[name] = TensorSpec(name=name, dtype=out.dtype, dims=out.dims)
        self._crossing[name] = self._specs[name]
        views = {k: View(tensor=v.name, start=v.start, width=v.width) for k, v in inputs.items()}
        self._waiting.append(OpStep(op=op, layer=layer, inputs=views, outputs={"out": name}, weights=weights))
        last = out.dims[-1]
        assert isinstance(last, int), "channels are never dynamic"
        return Value(name, 0, last)

    def cut(self, label: str, share: str | None = None) -> None:
        """End the current network where the flavour is segmented, and run the operations that wait for it; a network
        without wanted outputs is left out.
        """
        if self.segmented:
            self._close(label, share)

    def finish(self, outputs: dict[str, str]) -> Program:
        """End the last network -> the program; outputs: what the caller reads, by role, and its tensor."""
        for name in outputs.values():
            self.keep(name)
        self._close(f"end of {self._name}", None)
        return Program(name=self._name, tensors=self._crossing, outputs=outputs, steps=tuple(self._steps))

    def _close(self, label: str, share: str | None) -> None:
        wanted = [n for n in self._produced if n in self._needs.names]
        if self._network is not None and (wanted or self._always):
            outputs = [self._specs[n] for n in wanted]
            for spec in outputs:
                self._network.output(self._live[spec.name], spec.name)
                self._crossing[spec.name] = spec
            for name, (tensor, spec) in self._always.items():
                self._network.output(tensor, name)
                outputs.append(spec)
                self._crossing[name] = spec
            segment = Segment(self._name, label, self._network, tuple(self._inputs.values()), tuple(outputs), share)
            engine = self._emit(segment)
            step = EngineStep(
                engine=engine, inputs={s.name: s.name for s in segment.inputs},
                outputs={s.name: s.name for s in segment.outputs},
            )  # fmt: skip
            self._steps.append(step)
        self._steps += self._waiting
        self._waiting = []
        self._open()

    def _crosses(self, spec: TensorSpec) -> None:
        self._needs.names.add(spec.name)
        self._crossing[spec.name] = spec

    def _unique(self, hint: str) -> str:
        count = self._counts[hint] = self._counts.get(hint, 0) + 1
        return hint if count == 1 else f"{hint}.{count}"
