"""Runs a bundle's program: engines and native operations in turn over one step's tensors.

A decode step runs over slots 0..B-1 in B rows, whatever order its rows have (`tensorrt_rows`). Its tensors and bindings
are made when a shape first comes and then stay, so that nothing but enqueueing is left, which can be recorded. A prompt
chunk runs alone, on the caches of its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.bindings import (
    ALIAS_SUFFIX,
    CARRY_INDEX,
    HIDDEN,
    HIDDEN_IN,
    IDS,
    LOGITS,
    NUM_TOKENS,
    PHASE,
    POSITION,
    POSITIONS,
    ROW_FLAGS,
    SLOT,
    TOKEN_INDEX,
    EngineStep,
    OpStep,
    Program,
    layer_tensor,
)
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.manifest import CONTEXT, GENERATION, VERIFY, Manifest
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.capture import Recording
from trtllm_replayssm.runtime.session.step_context import HostRow, Phase, StepContext
from trtllm_replayssm.runtime.session.tensorrt_buffers import ProgramBuffers
from trtllm_replayssm.runtime.session.tensorrt_ops import NativeStepOps
from trtllm_replayssm.runtime.session.tensorrt_rows import SlotRows
from trtllm_replayssm.runtime.session.tensorrt_state import PluginState


class Engines(Protocol):
    """The engines of a bundle, by file name."""

    def bind(
        self, engine: str, profile: int, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], *, own: bool
    ) -> Callable[[], None]:
        """A call that enqueues one engine with profile number `profile`; writes the outputs, which are allocated.

        own: nothing that runs later tells its execution context anything else, so that the call can be recorded.
        """
        ...

    def obstacle(self) -> str | None:
        """Why what is bound with `own` cannot be recorded on the current stream; None when it can."""
        ...

    def save_kernels(self) -> None:
        """Keep what was compiled for this GPU for the next process, where there is a place for it."""
        ...


@dataclass(frozen=True, slots=True)
class _Step:
    """Dense rows: cache row b belongs to slot first + b. ids [B, T], index [B, K], hidden [B, T, hidden] or None.

    flags: RSSM_PREFILL_* of all rows.
    """

    first: int
    profile: str
    context: StepContext
    ids: Tensor
    index: Tensor
    hidden: Tensor | None
    flags: int = 0

    def inputs(self) -> dict[str, Tensor | int]:
        """What the program's tensors of a step are given, by name; a number fills its tensor."""
        rows = self.context.rows
        given: dict[str, Tensor | int] = {
            IDS: self.ids, POSITION: self.context.start, POSITIONS: self.context.positions(), TOKEN_INDEX: self.index,
            SLOT: rows.slot, NUM_TOKENS: rows.num_tokens, ROW_FLAGS: self.flags, CARRY_INDEX: 0, PHASE: 0,
        }  # fmt: skip
        return given if self.hidden is None else {**given, HIDDEN_IN: self.hidden}


@dataclass(frozen=True, slots=True)
class _Bound:
    """A program over tensors that stay where they are. calls: its steps in order."""

    tensors: dict[str, Tensor]
    calls: list[Callable[[StepContext], None]]


class ProgramRunner:
    """The programs of one bundle over one set of pools.

    plugins: state and experts that engines with plugins bind; None where native operations run between engines.
    """

    def __init__(
        self, manifest: Manifest, engines: Engines, ops: NativeStepOps, pools: StatePools, *,
        recording: Recording, plugins: PluginState | None = None,
    ) -> None:  # fmt: skip
        self._manifest = manifest
        self._engines = engines
        self._ops = ops
        self._pools = pools
        self._recording = recording
        self._device = pools.cursors.position.device
        self._profiles = list(manifest.profiles)
        own = {} if plugins is None else plugins.tensors
        self._plugins = plugins
        self._state = {**own, **{name + ALIAS_SUFFIX: tensor for name, tensor in own.items()}}
        self._buffers = ProgramBuffers(self._device)
        self._bound: dict[tuple[str, int, int, bool], _Bound] = {}

    def run(self, name: str, context: StepContext, ids: Tensor, hidden: Tensor | None) -> ModelOutput[Tensor]:
        """One pass of program `name` over the context's rows, in their order.

        ids [B, T] int64 -> hidden [B, T, hidden] in the activation type, logits [B, K, vocab] float32: K = T in a
        decode step, else 1, the row's last token. Slots are below B but in a prompt chunk. Only that waits for the
        device, where the native operations do not.
        """
        if context.phase is not Phase.PREFILL:
            return self._together(name, context, ids, hidden)
        width = ids.shape[1]
        out: ModelOutput[Tensor] | None = None
        for index, row in enumerate(context.on_host):
            if row.slot < 0:
                continue
            alone = self._alone(name, context, index, row, ids, hidden)
            if out is None:
                states = alone.hidden.new_zeros((len(ids), width, alone.hidden.shape[-1]))
                out = ModelOutput(states, alone.logits.new_zeros((len(ids), *alone.logits.shape[1:])))
            out.hidden[index], out.logits[index] = _padded(alone.hidden[0], width), alone.logits[0]
        assert out is not None, "a prompt chunk has a row"
        return out

    def _together(self, name: str, context: StepContext, ids: Tensor, hidden: Tensor | None) -> ModelOutput[Tensor]:
        """All rows at once, moved to the rows of their slots."""
        moved, width = SlotRows.of(context.rows, self._pools.pool.slots), ids.shape[1]
        dense = moved.context(context, self._pools.pool.max_seq_len)
        if context.phase is Phase.DECODE:
            index = torch.arange(width, device=self._device).expand(moved.count, width)
        else:
            index = (dense.rows.num_tokens - 1).clamp(min=0)[:, None]
        step = _Step(
            0, GENERATION if width == 1 else VERIFY, dense, moved.scatter(ids), index,
            None if hidden is None else moved.scatter(hidden),
        )  # fmt: skip
        out = self._execute(self._manifest.programs[name], step)
        return ModelOutput(moved.gather(out.hidden), moved.gather(out.logits))

    def _alone(
        self, name: str, context: StepContext, index: int, row: HostRow, ids: Tensor, hidden: Tensor | None
    ) -> ModelOutput[Tensor]:
        """One row with its own tokens only, on the caches of its slot."""
        count, limit = row.num_tokens, self._manifest.build.context_tokens
        if not 1 <= count <= limit:
            raise ContractError(
                "prefill", "tokens", expected=f"1..{limit}, the context_tokens that the bundle was built for",
                got=count, hint="Send the prompt in smaller chunks, or build with larger --context-tokens",
            )  # fmt: skip
        one = slice(index, index + 1)
        rows = StepRows(context.rows.slot[one], context.rows.num_tokens[one])
        single = StepContext(context.phase, rows, context.start[one], count, context.last_chunk[one])
        last = torch.tensor([[count - 1]], device=self._device)
        part = None if hidden is None else hidden[one, :count]
        flags = 0
        if self._plugins is not None and hidden is None:
            flags = self._plugins.begin_chunk(self._pools, row.slot, last=row.last_chunk)
        step = _Step(row.slot, CONTEXT, single, ids[one, :count], last, part, flags)
        out = self._execute(self._manifest.programs[name], step)
        if self._plugins is not None and hidden is None:
            self._plugins.end_chunk(self._pools, row.slot, last=row.last_chunk)
        return out

    def _execute(self, program: Program, step: _Step) -> ModelOutput[Tensor]:
        """Run it -> its own tensors: the next step overwrites them."""
        if step.profile not in self._profiles:
            raise ContractError(
                "decode", "tokens", expected="1 token a row, as the bundle was built for", got=step.ids.shape[1],
                hint="Build with a larger --max-draft-len",
            )  # fmt: skip
        bound = self._find(program, step)
        for name, value in step.inputs().items():
            if name in bound.tensors:
                tensor = bound.tensors[name]
                tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)
        for call in bound.calls:
            call(step.context)
        hidden, logits = (bound.tensors[program.outputs[role]] for role in (HIDDEN, LOGITS))
        return ModelOutput(hidden, logits)

    def _find(self, program: Program, step: _Step) -> _Bound:
        """The program bound for the step's shape. Recorded work has bindings of its own."""
        if step.profile == CONTEXT:
            return self._bind(program, step, own=False)
        own = self._recording.active
        key = (program.name, *step.ids.shape, own)
        if key not in self._bound:
            self._bound[key] = self._bind(program, step, own=own)
        return self._bound[key]

    def _bind(self, program: Program, step: _Step, *, own: bool) -> _Bound:
        (rows, width), selected = step.ids.shape, step.index.shape[1]
        extents = {"B": rows, "T": width, "K": selected, "R": self._manifest.profiles[step.profile].phase}
        elsewhere = {**self._caches(step.first, rows), **self._state}
        make = self._buffers.passing if step.profile == CONTEXT else self._buffers.lasting
        tensors = {**make(program, extents, elsewhere), **elsewhere}
        profile = self._profiles.index(step.profile)
        return _Bound(tensors, [self._call(item, profile, tensors, own=own) for item in program.steps])

    def _call(
        self, item: EngineStep | OpStep, profile: int, tensors: dict[str, Tensor], *, own: bool
    ) -> Callable[[StepContext], None]:
        if isinstance(item, OpStep):
            return lambda context: self._ops.run(item, context, tensors)
        inputs = {binding: tensors[name] for binding, name in item.inputs.items()}
        outputs = {binding: tensors[name] for binding, name in item.outputs.items()}
        enqueue = self._engines.bind(item.engine, profile, inputs, outputs, own=own)
        return lambda context: enqueue()

    def _caches(self, first: int, rows: int) -> dict[str, Tensor]:
        """Keys and values of `rows` slots from `first` on, also under the names of the outputs that alias them."""
        caches = {}
        for layer, kv in self._pools.kv.items():
            for part, pool in (("keys", kv.keys), ("values", kv.values)):
                name = layer_tensor(layer, part)
                caches[name] = caches[name + ALIAS_SUFFIX] = pool[first : first + rows]
        return caches


def _padded(states: Tensor, width: int) -> Tensor:
    """states [n, hidden] -> [width, hidden], zeros behind."""
    return functional.pad(states, (0, 0, 0, width - len(states)))
