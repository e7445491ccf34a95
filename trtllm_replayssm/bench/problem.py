"""One benchmark problem on the device: a pool of one layer, several times the L2, and the native calls over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.launches import LaunchPlan, UpdateLaunch
from trtllm_replayssm.ops import _abi, torch_ops
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState
from trtllm_replayssm.ops.native import registers, state_tensors
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.ops.views import current_stream
from trtllm_replayssm.shapes import SsmKind

COLD_BYTES = 400 << 20  # state that launches of a graph pass over before they return to the first slot
_LEAST_LAUNCHES = 12  # of a graph, whose own start is part of the time
_LEAST_ROTATIONS = 4  # launches that promise settled states may overlap two others: their slots must be others
Committed = int | tuple[int, ...]  # records: of every slot, or of slots in turn
_KINDS = {SsmKind.MAMBA2: _abi.Kind.MAMBA2, SsmKind.GDN: _abi.Kind.GDN}


class LaunchMode(str, Enum):
    """How a launch follows the one before it; SETTLED is how sessions launch."""

    PLAIN = "plain"
    PROGRAMMATIC = "programmatic"
    SETTLED = "settled"


_FLAGS = {
    LaunchMode.PLAIN: 0,
    LaunchMode.PROGRAMMATIC: _abi.UPDATE_PROGRAMMATIC_LAUNCH,
    LaunchMode.SETTLED: _abi.UPDATE_PROGRAMMATIC_LAUNCH | _abi.UPDATE_SETTLED_STATE,
}  # the same of conventional.h


@dataclass
class Problem:
    """Inputs [B, T, ...] bfloat16 and a pool of B * rotations slots with random content; `inputs` as in update.h.

    A conventional case has `states` [S, E, H, P * N] float32 and no layer state.
    """

    case: KernelCase
    native: _abi.Library
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    cold: bool = True
    entries: int = 0  # states of a conventional slot; 0: what the case needs
    launch: UpdateLaunch | None = None  # of an update; None: the library's choice
    inputs: dict[str, Tensor] = field(init=False)
    state: ReplayLayerState | None = field(init=False, default=None)
    cursors: CursorTensors = field(init=False)
    states: Tensor | None = field(init=False, default=None)
    slots: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        case, generator = self.case, torch.Generator(self.device).manual_seed(7)
        row_bytes = case.floor_bytes(0) // case.rows
        rotations = max(_LEAST_ROTATIONS, -(-COLD_BYTES // (case.rows * row_bytes))) if self.cold else 1
        total = case.rows * rotations
        self._generator = generator
        self.inputs = self._inputs()
        self.cursors = CursorTensors.allocate(total, self.device)
        if case.operation is Operation.CONVENTIONAL:
            entries = self.entries or (case.tokens + 1 if case.tokens > 1 else 1)
            shape = case.shape
            self.states = self._uniform(total, entries, shape.heads, shape.head_dim * shape.state_dim, low=-1.0)
        else:
            self.state = ReplayLayerState.allocate(case.shape, case.config, 0, total, torch.bfloat16, self.device)
            self._fill_state(self.state)
            rows = case.config.ring_rows
            self.cursors.origin.copy_(torch.arange(total, device=self.device) * 7 % rows)
        order = torch.randperm(case.rows, generator=generator, device=self.device).int()
        self.slots = [order + rotation * case.rows for rotation in range(rotations)]
        self.num_tokens = torch.full((case.rows,), case.tokens, dtype=torch.int32, device=self.device)
        self.out = torch.full_like(self.inputs["value"], float("nan"))
        self._pending: dict[Committed, Tensor] = {}
        self._workspace = torch.zeros(0, dtype=torch.uint8, device=self.device)
        if self.state is not None:
            size = (
                self.native.prefill_workspace(self._prefill_args(0, 0))
                if self.prompt
                else self.native.update_workspace(self._update_args(0, 0, 0))
            )
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)

    @property
    def kind(self) -> int:
        """RSSM_MAMBA2 or RSSM_GDN."""
        return int(_KINDS[self.case.shape.kind])

    @property
    def prompt(self) -> bool:
        """Whether the tokens are a prompt."""
        return self.case.operation is Operation.PREFILL

    @property
    def launches(self) -> int:
        """Launches of one graph: every slot at least once."""
        return len(self.slots) * (-(-_LEAST_LAUNCHES // len(self.slots)))

    def enqueue(self, h: Committed, mode: LaunchMode) -> None:
        """All launches of one graph, with h committed records."""
        for launch in range(self.launches):
            self.run(launch % len(self.slots), h, mode)

    def run(self, rotation: int, h: Committed, mode: LaunchMode = LaunchMode.PLAIN) -> None:
        """One launch over the slots of a rotation."""
        stream = current_stream(self.out)
        if self.state is None:
            args = torch_ops.fill(
                _abi.ConventionalArgs, {**self._shared(rotation), "state": self.states},
                kind=self.kind, flags=_FLAGS[mode],
            )  # fmt: skip
            self.native.conventional_update(args, stream)
            return
        workspace = (self._workspace.data_ptr(), self._workspace.numel(), stream)
        if self.prompt:
            self.native.prefill(self._prefill_args(rotation, h), *workspace)
        else:
            self.native.update(self._update_args(rotation, h, _FLAGS[mode]), *workspace)

    def plan(self, multiprocessors: int) -> LaunchPlan:
        """The launch that the update takes on a device of so many multiprocessors."""
        return self.native.update_launch_plan(self._update_args(0, 0, 0), multiprocessors)

    def set_pending(self, h: int) -> None:
        """Make h the committed records of every slot, as a reader of the cursors sees them."""
        self.cursors.h.fill_(h)

    def _shared(self, rotation: int) -> dict[str, Tensor | None]:
        return {**self.inputs, "slot": self.slots[rotation], "num_tokens": self.num_tokens, "out": self.out}

    def _layer(self, rotation: int, h: Committed) -> dict[str, Tensor | None]:
        assert self.state is not None
        tensors = {**self._shared(rotation), **registers(self.cursors), **state_tensors(self.state)}
        return {**tensors, "h": self._committed(h)}

    def _update_args(self, rotation: int, h: Committed, flags: int) -> Any:
        tensors = self._layer(rotation, h)
        launch = _abi.LaunchConstants(*([] if self.launch is None else self.launch.numbers))
        numbers = {"kind": self.kind, "window": self.case.window, "flags": flags}
        return torch_ops.fill(_abi.UpdateArgs, tensors, launch=launch, **numbers)

    def _prefill_args(self, rotation: int, h: Committed) -> Any:
        tensors = self._layer(rotation, h)
        return torch_ops.fill(_abi.PrefillArgs, tensors, kind=self.kind, window=self.case.window)

    def _committed(self, h: Committed) -> Tensor:
        if h not in self._pending:  # before a graph is captured: each of its launches runs once outside
            turns = torch.tensor(h if isinstance(h, tuple) else (h,), dtype=torch.int32, device=self.device)
            self._pending[h] = turns[torch.arange(self.cursors.h.numel(), device=self.device) % turns.numel()]
        return self._pending[h]

    def _uniform(self, *size: int, low: float, high: float = 1.0) -> Tensor:
        values = torch.empty(size, device=self.device)
        return values.uniform_(low, high, generator=self._generator)

    def _inputs(self) -> dict[str, Tensor]:
        shape, lead = self.case.shape, (self.case.rows, self.case.tokens)
        inputs = {
            "value": self._uniform(*lead, shape.heads, shape.head_dim, low=-1.0).bfloat16(),
            "k": self._uniform(*lead, shape.groups, shape.state_dim, low=-1.0).bfloat16(),
            "q": self._uniform(*lead, shape.groups, shape.state_dim, low=-1.0).bfloat16(),
        }
        if shape.kind is SsmKind.GDN:
            inputs["log_decay"] = self._uniform(*lead, shape.heads, low=-0.2, high=-0.001)
            inputs["beta"] = self._uniform(*lead, shape.heads, low=0.1)
            return inputs
        inputs["dt"] = self._uniform(*lead, shape.heads, low=0.001, high=0.1)
        inputs["a"] = self._uniform(shape.heads, low=-16.0, high=-1.0)
        inputs["skip"] = self._uniform(shape.heads, low=-1.0)
        return inputs

    def _fill_state(self, state: ReplayLayerState) -> None:
        gdn = state.shape.kind is SsmKind.GDN
        for store in (state.checkpoint, state.read_copy):
            if store is not None:
                self._fill_store(store)
        for ring in (state.ring_value, state.ring_key, state.ring_v):
            if ring is not None:
                ring.copy_(self._uniform(*ring.shape, low=-1.0))
        low, high = (-0.2, -0.001) if gdn else (0.001, 0.1)
        state.ring_decay.copy_(self._uniform(*state.ring_decay.shape, low=low, high=high))
        if state.ring_key_factor is not None:
            square = state.ring_key.float().square().sum(-1)
            state.ring_key_factor.copy_((square + 1e-6).rsqrt())
        if state.ring_beta is not None:
            state.ring_beta.copy_(self._uniform(*state.ring_beta.shape, low=0.1))

    def _fill_store(self, store: StateStore) -> None:
        """Random states whose numbers are about 1, in any format."""
        if store.head_scale is not None:
            store.data.random_(0, 256, generator=self._generator)
            store.head_scale.copy_(self._uniform(*store.head_scale.shape, low=0.1, high=0.4))
        elif store.block_scale is not None:
            store.data.copy_(self._uniform(*store.data.shape, low=-448.0, high=448.0))
        else:
            store.data.copy_(self._uniform(*store.data.shape, low=-1.0))
        if store.block_scale is not None:
            high = 1.0 if store.head_scale is not None else 1.0 / 300.0
            store.block_scale.copy_(self._uniform(*store.block_scale.shape, low=high / 4, high=high))
