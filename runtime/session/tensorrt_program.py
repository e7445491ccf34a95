"""Runs a bundle's program: engines and native operations in turn over one step's tensors.

Cache rows are step rows. A decode step therefore runs over slots 0..highest, where slots that take no part are padding:
they keep their state, and the keys and values they write lie behind their position, where nothing reads. A prompt chunk
runs alone, on the caches of its slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
    Program,
    layer_tensor,
)
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.manifest import Manifest
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.tensorrt_ops import NativeStepOps
from trtllm_replayssm.runtime.session.tensorrt_state import PluginState

CONTEXT, GENERATION, VERIFY = "context", "generation", "verify"
_TORCH_TYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32,
}  # fmt: skip


class Engines(Protocol):
    """The engines of a bundle, by file name."""

    def run(self, engine: str, profile: int, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Enqueue one engine with profile number `profile`; writes the outputs, which are allocated."""
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


class ProgramRunner:
    """The programs of one bundle over one set of pools.

    plugins: state and experts that engines with plugins bind; None where native operations run between engines.
    """

    def __init__(
        self, manifest: Manifest, engines: Engines, ops: NativeStepOps, pools: StatePools, *,
        plugins: PluginState | None = None,
    ) -> None:  # fmt: skip
        self._manifest = manifest
        self._engines = engines
        self._ops = ops
        self._pools = pools
        self._plugins = plugins
        self._device = pools.cursors.position.device
        self._profiles = list(manifest.profiles)
        self._buffers: dict[tuple[str, int, int, int], dict[str, Tensor]] = {}

    def run(self, name: str, context: StepContext, ids: Tensor, hidden: Tensor | None) -> ModelOutput[Tensor]:
        """One pass of program `name` over the context's rows, in their order.

        ids [B, T] int64 -> hidden [B, T, hidden] in the activation type, logits [B, K, vocab] float32: K = T in a
        decode step, else 1, the row's last token.
        """
        narrow = ids.shape[1] <= self._manifest.replay.max_step_tokens
        if context.phase is Phase.DECODE or (hidden is not None and narrow):
            return self._together(name, context, ids, hidden)
        rows = [self._alone(name, context, row, ids, hidden) for row in range(len(ids))]
        width = ids.shape[1]
        states = [torch.nn.functional.pad(r.hidden, (0, 0, 0, width - r.hidden.shape[1])) for r in rows]
        return ModelOutput(torch.cat(states), torch.cat([r.logits for r in rows]))

    def _together(self, name: str, context: StepContext, ids: Tensor, hidden: Tensor | None) -> ModelOutput[Tensor]:
        """All rows at once, moved to the rows of their slots."""
        present = torch.nonzero(context.rows.slot >= 0).flatten()
        place = context.rows.slot[present].long()
        count, width = (int(place.max()) + 1 if len(place) else 1), ids.shape[1]
        slot = torch.full((count,), -1, dtype=torch.int64, device=self._device)
        tokens = torch.zeros_like(slot)
        start = self._pools.cursors.position[:count].long()
        slot[place], tokens[place] = place, context.rows.num_tokens[present].long()
        start[place] = context.start[present]
        rows = StepRows(slot, tokens)
        dense = StepContext(context.phase, rows, start, width, torch.ones(count, dtype=torch.bool))
        if context.phase is Phase.DECODE:
            index = torch.arange(width, device=self._device).expand(count, width)
        else:
            index = (tokens - 1).clamp(min=0)[:, None]
        step = _Step(
            0, GENERATION if width == 1 else VERIFY, dense, _scatter(ids, present, place, count), index,
            None if hidden is None else _scatter(hidden, present, place, count),
        )  # fmt: skip
        out = self._execute(self._manifest.programs[name], step)
        source = context.rows.slot.clamp(min=0)  # what padding rows get is not read
        return ModelOutput(out.hidden[source], out.logits[source])

    def _alone(
        self, name: str, context: StepContext, row: int, ids: Tensor, hidden: Tensor | None
    ) -> ModelOutput[Tensor]:
        """One row with its own tokens only, on the caches of its slot."""
        count, slot = int(context.rows.num_tokens[row]), int(context.rows.slot[row])
        limit = self._manifest.build.context_tokens
        if not 1 <= count <= limit:
            raise ContractError(
                "prefill", "tokens", expected=f"1..{limit}, the context_tokens that the bundle was built for",
                got=count, hint="Send the prompt in smaller chunks, or build with larger --context-tokens",
            )  # fmt: skip
        one = slice(row, row + 1)
        rows = StepRows(context.rows.slot[one], context.rows.num_tokens[one])
        single = StepContext(context.phase, rows, context.start[one], count, context.last_chunk[one])
        index = torch.tensor([[count - 1]], device=self._device)
        part = None if hidden is None else hidden[one, :count]
        last, flags = bool(context.last_chunk[row]), 0
        if self._plugins is not None and hidden is None:
            flags = self._plugins.begin_chunk(self._pools, slot, last=last)
        step = _Step(slot, CONTEXT, single, ids[one, :count], index, part, flags)
        out = self._execute(self._manifest.programs[name], step)
        if self._plugins is not None and hidden is None:
            self._plugins.end_chunk(self._pools, slot, last=last)
        return out

    def _execute(self, program: Program, step: _Step) -> ModelOutput[Tensor]:
        if step.profile not in self._profiles:
            raise ContractError(
                "decode", "tokens", expected="1 token a row, as the bundle was built for", got=step.ids.shape[1],
                hint="Build with a larger --max-draft-len",
            )  # fmt: skip
        profile = self._profiles.index(step.profile)
        memory = self._tensors(program, step)
        for item in program.steps:
            if isinstance(item, EngineStep):
                self._engines.run(
                    item.engine, profile, {k: memory[v] for k, v in item.inputs.items()},
                    {k: memory[v] for k, v in item.outputs.items()},
                )  # fmt: skip
            else:
                self._ops.run(item, step.context, memory)
        # the buffers serve the next step: what leaves is a copy
        hidden, logits = (memory[program.outputs[role]] for role in (HIDDEN, LOGITS))
        return ModelOutput(hidden.clone(), logits.clone())

    def _tensors(self, program: Program, step: _Step) -> dict[str, Tensor]:
        """Every tensor of the program: static buffers, the step's inputs, and the cache rows of the step's slots."""
        (rows, width), selected = step.ids.shape, step.index.shape[1]
        key = (program.name, rows, width, selected)
        buffers = self._buffers.get(key)
        if buffers is None:
            phase = self._manifest.profiles[step.profile].phase
            buffers = self._allocate(program, {"B": rows, "T": width, "K": selected, "R": phase})
            if step.profile != CONTEXT:  # prompt chunks have any length: keeping their buffers would fill the memory
                self._buffers[key] = buffers
        given: dict[str, Tensor | int] = {
            IDS: step.ids, POSITION: step.context.start, POSITIONS: step.context.positions(), TOKEN_INDEX: step.index,
            SLOT: step.context.rows.slot, NUM_TOKENS: step.context.rows.num_tokens, ROW_FLAGS: step.flags,
            CARRY_INDEX: 0, PHASE: 0,
        }  # fmt: skip
        if step.hidden is not None:
            given[HIDDEN_IN] = step.hidden
        for name, value in given.items():
            if name in buffers:
                buffers[name].copy_(value) if isinstance(value, Tensor) else buffers[name].fill_(value)
        caches = {}
        for layer, kv in self._pools.kv.items():
            for part, pool in (("keys", kv.keys), ("values", kv.values)):
                view = pool[step.first : step.first + rows]
                caches[layer_tensor(layer, part)] = caches[layer_tensor(layer, part) + ALIAS_SUFFIX] = view
        return {**buffers, **caches, **self._bound()}

    def _bound(self) -> dict[str, Tensor]:
        """State and experts of engines with plugins, also under the names of the outputs that alias them."""
        tensors = {} if self._plugins is None else self._plugins.tensors
        return {**tensors, **{name + ALIAS_SUFFIX: tensor for name, tensor in tensors.items()}}

    def _allocate(self, program: Program, extents: Mapping[str, int]) -> dict[str, Tensor]:
        caches = {layer_tensor(layer, part) for layer in self._pools.kv for part in ("keys", "values")}
        bound = caches | self._bound().keys()
        buffers = {}
        for name, spec in program.tensors.items():
            if name.removesuffix(ALIAS_SUFFIX) not in bound:
                dims = [extents[d] if isinstance(d, str) else d for d in spec.dims]
                buffers[name] = torch.zeros(dims, dtype=_TORCH_TYPES[spec.dtype], device=self._device)
        return buffers


def _scatter(values: Tensor, present: Tensor, place: Tensor, count: int) -> Tensor:
    """Rows `present` of values [B, ...] at rows `place` of a zero tensor [count, ...]."""
    dense = torch.zeros((count, *values.shape[1:]), dtype=values.dtype, device=values.device)
    dense[place] = values[present]
    return dense
