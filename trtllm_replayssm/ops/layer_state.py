"""The pool tensors of one SSM layer and the cursors that all layers share: what the stateful operations read and write.

Letters: S slots, H value heads, G key heads, P = d_v, N = d_k, C = L + T_max ring rows, K convolution width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.shapes import SsmKind, SsmShape


@dataclass
class CursorTensors:
    """Per-slot registers, each [S]: origin, h, position int32; seed int64. Commit, prefill and reset change them."""

    origin: Tensor
    h: Tensor
    position: Tensor
    seed: Tensor

    @staticmethod
    def allocate(slots: int, device: torch.device) -> CursorTensors:
        """All zero."""
        origin, h, position = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(3))
        return CursorTensors(origin, h, position, torch.zeros(slots, dtype=torch.int64, device=device))

    def tensors(self) -> list[Tensor]:
        """The registers."""
        return [self.origin, self.h, self.position, self.seed]


@dataclass
class ReplayLayerState:
    """Checkpoint copies and ring of one layer.

    ring_value: [S, H, C, P] activation dtype (Mamba-2: x), float16 (GDN: the correction u)
    ring_key: [S, G, C, N] activation dtype, raw; ring_key_factor: [S, G, C] float32, GDN only
    ring_decay: [S, H, C] float32, per token: dt after softplus (Mamba-2), log-decay g (GDN)
    ring_v [S, H, C, P] activation dtype and ring_beta [S, H, C] float32: GDN whose flush re-derives
    """

    shape: SsmShape
    config: ReplayConfig
    layer: int
    checkpoint: StateStore
    read_copy: StateStore | None
    ring_value: Tensor
    ring_key: Tensor
    ring_decay: Tensor
    ring_key_factor: Tensor | None
    ring_v: Tensor | None
    ring_beta: Tensor | None

    @staticmethod
    def allocate(
        shape: SsmShape, config: ReplayConfig, layer: int, slots: int, activation: torch.dtype, device: torch.device
    ) -> ReplayLayerState:
        """Zero states and rings for `slots` slots."""
        gdn, rows = shape.kind is SsmKind.GDN, config.ring_rows

        def ring(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((slots, *sizes), dtype=dtype, device=device)

        read = None if config.read is None else StateStore.allocate(config.read, shape, slots, device)
        rederives = gdn and config.rederives
        return ReplayLayerState(
            shape=shape,
            config=config,
            layer=layer,
            checkpoint=StateStore.allocate(config.recurrence, shape, slots, device),
            read_copy=read,
            ring_value=ring(shape.heads, rows, shape.head_dim, dtype=torch.float16 if gdn else activation),
            ring_key=ring(shape.groups, rows, shape.state_dim, dtype=activation),
            ring_decay=ring(shape.heads, rows),
            ring_key_factor=ring(shape.groups, rows) if gdn else None,
            ring_v=ring(shape.heads, rows, shape.head_dim, dtype=activation) if rederives else None,
            ring_beta=ring(shape.heads, rows) if rederives else None,
        )

    def ring_tensors(self) -> list[Tensor]:
        """The ring's tensors, [S, heads or groups, C, ...]."""
        ring = (self.ring_value, self.ring_key, self.ring_decay, self.ring_key_factor, self.ring_v, self.ring_beta)
        return [t for t in ring if t is not None]

    def tensors(self) -> list[Tensor]:
        """Every tensor, slot axis first."""
        read = [] if self.read_copy is None else self.read_copy.tensors()
        return [*self.checkpoint.tensors(), *read, *self.ring_tensors()]


@dataclass
class ConventionalLayerState:
    """The baseline: states [S, T_max + 1, H, P, N] float32, one snapshot per verified token beside the current one.

    The current state is entry `origin` of the slot; token s of a step writes entry (origin + 1 + s) mod (T_max + 1).
    """

    shape: SsmShape
    config: ReplayConfig
    layer: int
    states: Tensor

    @staticmethod
    def allocate(
        shape: SsmShape, config: ReplayConfig, layer: int, slots: int, device: torch.device
    ) -> ConventionalLayerState:
        """Zero states for `slots` slots."""
        sizes = (slots, config.max_step_tokens + 1, shape.heads, shape.head_dim, shape.state_dim)
        return ConventionalLayerState(shape, config, layer, torch.zeros(sizes, device=device))

    def tensors(self) -> list[Tensor]:
        """Every tensor, slot axis first."""
        return [self.states]


LayerState = ReplayLayerState | ConventionalLayerState


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, checked: slot [B] (-1 = padding) and num_tokens [B] (0..T), int64 or int32.

    flushes: what the host knows of a step without padding whose rows have all of the step's tokens: True, all rows
    flush; False, none does. The reference operations then read nothing back and can be captured. None: not known.

    HAZARD: without it the `active` forms count rows, for which the host waits for the device; captured work uses the
    int32 forms.
    """

    slot: Tensor
    num_tokens: Tensor
    flushes: bool | None = None

    @cached_property
    def active(self) -> Tensor:
        """[A] int64: indices of the rows that do anything."""
        if self.flushes is not None:
            return torch.arange(len(self.slot), device=self.slot.device)
        return torch.nonzero((self.slot >= 0) & (self.num_tokens > 0)).flatten()

    @property
    def active_slot(self) -> Tensor:
        """[A] int64."""
        return self.slot[self.active].long()

    @property
    def active_num_tokens(self) -> Tensor:
        """[A] int64."""
        return self.num_tokens[self.active].long()

    @cached_property
    def slot_int32(self) -> Tensor:
        """[B] int32, as the kernels take it."""
        return self.slot.int()

    @cached_property
    def num_tokens_int32(self) -> Tensor:
        """[B] int32, as the kernels take it."""
        return self.num_tokens.int()
