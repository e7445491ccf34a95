"""One recurrent layer on the device with random states, driven through the C ABI and recorded for its plugin.

The C ABI is what tests/native compares with the specification, in every form used here. No test here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.stores import store_views
from tests.tensorrt.plugin_cases import PluginCase
from trtllm_replayssm.builders.plugin_fields import ROUNDING_CODES, STATE_FORMAT_CODES
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding
from trtllm_replayssm.launches import LaunchPlan
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState
from trtllm_replayssm.shapes import SsmKind

SLOTS, LAYER, CARRIES = 5, 37, 2
RINGS = {
    "ring_value": "ring_value", "ring_key": "ring_k", "ring_decay": "ring_dt", "ring_key_factor": "ring_key_factor",
    "ring_v": "ring_v", "ring_beta": "ring_beta",
}  # fmt: skip
ACTIVATION_CODES = {torch.bfloat16: _abi.Dtype.BFLOAT16, torch.float16: _abi.Dtype.FLOAT16}


def multiprocessors() -> int:
    """Of the device."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def conv_fields(channels: int, offset: int, act: torch.dtype = torch.bfloat16) -> dict[str, int | float]:
    """Of a convolution of so many channels behind `offset` others, 4 taps, steps of up to 4 tokens."""
    return {
        "channels": channels, "kernel": 4, "max_step_tokens": 4, "layer": 3, "activation": int(ACTIVATION_CODES[act]),
        "x_offset": offset,
    }  # fmt: skip


def convolved(library: _abi.Library, tensors: dict[str, Tensor], offset: int, *, prompt: bool) -> Tensor:
    """What the convolution writes; tensors: those of its plugin by their names there, position for cursor_position."""
    x, window = tensors["x"][..., offset:], tensors["window"]
    out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)
    given = {name: tensors[name] for name in ("slot", "num_tokens", "position", "bias")}
    given |= {"x": x, "weight": tensors["weight"][:, 0], "window": window, "out": out}
    args = _abi.Conv1dArgs(flags=0, **{name: harness.view(tensor) for name, tensor in given.items()})
    (library.conv1d_prefill if prompt else library.conv1d_update)(args, harness.Pool._stream())
    return out


class RecordedLayer:
    """Slots with 0, 3, 7, 8 and 1 committed records, and so on; the calls so far become a `PluginCase`.

    act: of the activations; heads: divisible by 2, the groups; head_dim: 64 (GDN 128); head_offset: of a rank's heads.
    """

    def __init__(
        self, library: _abi.Library, kind: SsmKind, config: ReplayConfig, *, act: torch.dtype = torch.bfloat16,
        heads: int = 8, head_dim: int | None = None, head_offset: int = 0, slots: int = SLOTS,
    ) -> None:  # fmt: skip
        self.native, self.config, self.gdn = library, config, kind is SsmKind.GDN
        self.act, self.head_offset = act, head_offset
        width = head_dim or (128 if self.gdn else 64)
        self.shape = ssm_shape(kind, heads=heads, groups=2, head_dim=width, state_dim=128)
        self.random = torch.Generator("cuda").manual_seed(3)
        s, device = self.shape, torch.device("cuda")
        self.state = ReplayLayerState.allocate(s, config, LAYER, slots, act, device)
        states = self.normal(slots, s.heads, s.head_dim, s.state_dim)
        for copy in (self.state.checkpoint, self.state.read_copy):
            if copy is not None:
                copy.store(list(range(slots)), states, Rounding.NEAREST, [None] * slots)
        for ring in self.state.ring_tensors():
            ring.copy_(self.uniform(*ring.shape))
        if self.gdn:
            self.state.ring_decay.neg_()
        self.carry = self.normal(CARRIES, s.heads, s.head_dim, s.state_dim)
        self.cursors = CursorTensors.allocate(slots, device)
        registers = [
            [0, 3, config.window, 5, 1], [0, 3, 7, 8, 1], [0, 90, 123456, 31, 2], [1, -5, 2**62 + 9, 7, 1 << 40],
        ]  # fmt: skip
        for tensor, values in zip(self.cursors.tensors(), registers, strict=True):
            tensor.copy_(torch.tensor(values).repeat(slots // SLOTS + 1)[:slots])
        self.a, self.skip = -16 * self.uniform(s.heads), self.normal(s.heads)
        self.start = [tensor.clone() for tensor in self.memory()]
        self.steps: list[list[Tensor]] = []
        self.outputs: list[Tensor] = []
        self.plans: list[LaunchPlan] = []  # of each step

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random, device="cuda")

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self.random, device="cuda")

    def memory(self) -> list[Tensor]:
        """Every state tensor in the plugin's order."""
        read = [] if self.state.read_copy is None else self.state.read_copy.tensors()
        return [*self.state.checkpoint.tensors(), *read, *self.state.ring_tensors(), self.carry]

    @property
    def channels(self) -> int:
        """Of the first projection."""
        return self.shape.inner + 2 * self.shape.groups * self.shape.state_dim

    def projections(self, mixed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The second projection beside `mixed` [rows, tokens, C], and the arguments that are ranges of both."""
        s = self.shape
        rows, tokens, _ = mixed.shape
        keys = ("q", "k", "value") if self.gdn else ("value", "k", "q")
        sizes = {"value": (s.heads, s.head_dim), "k": (s.groups, s.state_dim), "q": (s.groups, s.state_dim)}
        rates = 0.2 * self.uniform(rows, tokens, s.heads * (2 if self.gdn else 1))
        views, start = {}, 0
        for name in keys:
            heads, width = sizes[name]
            views[name] = mixed[..., start : start + heads * width].unflatten(-1, (heads, width))
            start += heads * width
        if self.gdn:
            rates[..., : s.heads].neg_()
            views |= {"log_decay": rates[..., : s.heads], "beta": rates[..., s.heads :]}
        else:
            views["dt"] = rates
        return rates, views

    def call(
        self, slots: list[int], counts: list[int], tokens: int, *, flags: list[int] | None = None,
        mixed: Tensor | None = None,
    ) -> None:  # fmt: skip
        """One step, or one prompt chunk where flags (of its rows) are given; the cursors of a step do not move.

        mixed [rows, tokens, C]: the first projection, random without.
        """
        rows, device = len(slots), "cuda"
        mixed = self.normal(rows, tokens, self.channels).to(self.act) if mixed is None else mixed
        rates, views = self.projections(mixed)
        index = {"slot": slots, "num_tokens": counts, "row_flags": flags or [0] * rows,
                 "carry_index": [row % CARRIES for row in range(rows)]}  # fmt: skip
        given = {name: torch.tensor(values, dtype=torch.int32, device=device) for name, values in index.items()}
        given |= {n: getattr(self.cursors, n).clone() for n in ("origin", "h", "position", "seed")}
        phase = torch.zeros(1 if flags is None else 2, dtype=torch.int32, device=device)
        weights = {} if self.gdn else {"a": self.a, "skip": self.skip}
        projections = [mixed] * 3 + [rates] * (2 if self.gdn else 1)
        registers = [given[n] for n in ("origin", "h", "position", "seed")]
        index_tensors = [given[n] for n in index]
        self.steps.append([*projections, *index_tensors, phase, *registers, *weights.values()])
        s = self.shape
        out = torch.full((rows, tokens, s.heads, s.head_dim), float("nan"), dtype=self.act, device=device)
        arguments = {n: harness.view(t) for n, t in {**views, **given, **weights, "out": out}.items()}
        arguments |= self.state_views()
        self.launch(arguments, prompt=flags is not None)
        self.outputs.append(out)

    def state_views(self) -> dict[str, _abi.Tensor]:
        rings = {own: getattr(self.state, name) for name, own in RINGS.items() if getattr(self.state, name) is not None}
        views = {name: harness.view(ring) for name, ring in rings.items()}
        views |= store_views("checkpoint", self.state.checkpoint)
        return views if self.state.read_copy is None else views | store_views("read", self.state.read_copy)

    def launch(self, arguments: dict[str, _abi.Tensor], *, prompt: bool) -> None:
        common = {
            "kind": int(_abi.Kind.GDN if self.gdn else _abi.Kind.MAMBA2), "window": self.config.window, "layer": LAYER,
            "head_offset": self.head_offset,
        }  # fmt: skip
        stream = torch.cuda.current_stream().cuda_stream
        if prompt:
            given = _abi.PrefillArgs(carry=harness.view(self.carry), **common, **arguments)
            workspace = torch.full((self.native.prefill_workspace(given),), 255, dtype=torch.uint8, device="cuda")
            self.native.prefill(given, workspace.data_ptr(), workspace.numel(), stream)
        else:
            only = {n: view for n, view in arguments.items() if n not in ("row_flags", "carry_index")}
            step = _abi.UpdateArgs(**common, **only)
            self.plans.append(self.native.update_launch_plan(step, multiprocessors()))
            workspace = torch.zeros(256, dtype=torch.uint8, device="cuda")
            self.native.update(step, workspace.data_ptr(), workspace.numel(), stream)
        torch.cuda.synchronize()

    def fields(self) -> dict[str, int | float]:
        s, config = self.shape, self.config
        values = {
            "heads": s.heads, "groups": s.groups, "head_dim": s.head_dim, "state_dim": s.state_dim,
            "window": config.window, "max_step_tokens": config.max_step_tokens,
            "recurrence": STATE_FORMAT_CODES[config.recurrence],
            "rounding": ROUNDING_CODES[config.recurrence_rounding], "read": STATE_FORMAT_CODES[config.read],
            "layer": LAYER, "head_offset": self.head_offset,
            "activation": int(ACTIVATION_CODES[self.act]),
        }  # fmt: skip
        keys = s.groups * s.state_dim
        if self.gdn:
            offsets = {"q": 0, "k": keys, "v": 2 * keys, "log_decay": 0, "beta": s.heads}
        else:
            offsets = {"x": 0, "k": s.inner, "q": s.inner + keys, "dt": 0}
        return {**values, **{f"{name}_offset": start for name, start in offsets.items()}}

    def case(self) -> tuple[PluginCase, list[Any], list[Any]]:
        """The calls so far -> case, outputs and states."""
        plugin = "GatedDeltaNetReplay" if self.gdn else "Mamba2Replay"
        results = [(self.act, self.shape.inner)]
        return PluginCase(plugin, self.fields(), self.steps, self.start, results), self.outputs, self.memory()
