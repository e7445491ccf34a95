"""Teacher-forced decoding of several streams by one session, and its recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trtllm_replayssm.config import MAX_STEP_TOKENS, PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, Rounding, StateFormat
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.layer_state import ConventionalLayerState
from trtllm_replayssm.ops.reference.gdn import gdn_fold
from trtllm_replayssm.ops.reference.mamba2 import mamba2_fold
from trtllm_replayssm.runtime.evaluation.forced_steps import ForcedSteps
from trtllm_replayssm.runtime.evaluation.rounding_pass import RoundingPass
from trtllm_replayssm.runtime.evaluation.saved_run import SavedRun, save_run
from trtllm_replayssm.runtime.evaluation.streams import Stream
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.base import PrefillChunk
from trtllm_replayssm.runtime.session.device import usable_device
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.weights.checkpoint import Checkpoint

# Widest steps of the kernels that keep or read less than float32 (replay_update/supported.inc of the plugins); those of
# float32 states take all that a pool may have.
_NARROW_STEPS = {SsmKind.MAMBA2: 8, SsmKind.GDN: 4}


@dataclass(frozen=True)
class Model:
    """A checkpoint whose weights all sessions of an evaluation share."""

    checkpoint: Checkpoint
    weights: TorchWeights
    activation: ActivationDtype
    device: torch.device

    @staticmethod
    def load(checkpoint: Checkpoint, *, device: str = "cpu", activation: ActivationDtype) -> Model:
        """Weights are read when first used. Raises DeviceError without the device."""
        target = usable_device(device)
        return Model(checkpoint, TorchWeights(checkpoint, torch_dtype(activation), target), activation, target)

    def session(self, replay: ReplayConfig, *, conventional: bool, slots: int, max_seq_len: int) -> TorchSession:
        """A session with pools of its own; conventional: float32 states, written at every token."""
        pool = PoolConfig(slots=slots, max_seq_len=max_seq_len, activation=self.activation)
        pools = StatePools.allocate(
            self.checkpoint.geometry, replay, pool, conventional=conventional, device=self.device
        )
        return TorchSession(self.weights, pools)


def needs_rounding_pass(model: Model, replay: ReplayConfig) -> bool:
    """Whether a pool's one copy is in a format that no kernel keeps, while kernels serve all else."""
    kept = replay.recurrence is StateFormat.FLOAT32 or (
        replay.recurrence is not StateFormat.NVFP4 and replay.recurrence_rounding is Rounding.STOCHASTIC
    )
    return _has_kernels(model) and not kept and replay.read is None


def widest_step(model: Model, replay: ReplayConfig) -> int:
    """Tokens of the widest step in which a pool's format runs as it runs best: by the kernels, where there are any."""
    plain = replay.recurrence is StateFormat.FLOAT32 and replay.read is None
    if not _has_kernels(model) or plain or needs_rounding_pass(model, replay):
        return MAX_STEP_TOKENS
    return _NARROW_STEPS[model.checkpoint.geometry.ssm.kind]


def _has_kernels(model: Model) -> bool:
    return model.device.type == "cuda" and model.activation is not ActivationDtype.FLOAT32


class ForcedDecoding:
    """One session that decodes its streams in step: row i is stream i. Results are those of plain decoding.

    A step of several tokens equals that many steps of one as long as it does not flush: it reads the same checkpoint.
    In a flush all tokens of a step read the old checkpoint, while plain decoding reads the new one behind the first. So
    steps are as wide as the pool and the window allow, and the one that flushes has one token.

    steps: what the device runs, see `ForcedSteps`.
    """

    def __init__(
        self, model: Model, replay: ReplayConfig, streams: Sequence[Stream], prompt: int, *,
        conventional: bool = False, spare_slots: int = 0, spare_tokens: int = 0, saved: SavedRun | None = None,
        rounding_pass: bool | None = None,
    ) -> None:  # fmt: skip
        """Prefills the first `prompt` tokens of each stream; with `saved`, goes on where that run was saved.

        rounding_pass: run float32 checkpoints and round them after each write; see there for what it stands in for.
        None: where kernels serve the activations but not the format.

        spare_slots, spare_tokens: room for copies of the streams' slots, and for tokens behind the streams' own.
        """
        self._model = model
        self._replay = replay
        self._conventional = conventional
        self.streams = streams
        longest = max(len(s.ids) for s in streams) + spare_tokens
        if rounding_pass is None:
            rounding_pass = not conventional and needs_rounding_pass(model, replay)
        kept = replace(replay, recurrence=StateFormat.FLOAT32) if rounding_pass else replay
        self.session = model.session(
            kept, conventional=conventional, slots=len(streams) + spare_slots, max_seq_len=longest
        )
        if saved is not None:
            loaded = [self.session.load_snapshot(saved.position, row, prompt_done=True) for row in saved.rows]
            self.slots = [self.session.restore(snapshot) for snapshot in loaded]
            self.position = saved.position
            self.records = self.session.cursors(self.slots[0]).h
        else:
            self.slots = [self.session.allocate(s.seed) for s in streams]
            chunks = [PrefillChunk(x, s.ids[:prompt], True) for x, s in zip(self.slots, streams, strict=True)]
            self.session.prefill(chunks)
            self.position = prompt
            self.records = 0
        self._rounds = rounding_pass
        rounding = self.rounding_of(self.slots)
        if rounding is not None and saved is None:
            rounding.apply(torch.full((len(streams),), prompt, device=model.device))
        self.steps = ForcedSteps(self.session, self.slots, [s.ids for s in streams], rounding)

    @property
    def device(self) -> torch.device:
        """Where the session runs."""
        return self._model.device

    def rounding_of(self, slots: Sequence[int]) -> RoundingPass | None:
        """What rounds the checkpoints of some slots of the session after each write, where this run rounds them."""
        return RoundingPass(self.session.pools, self._replay, slots) if self._rounds else None

    def flushes_next(self, records: int) -> bool:
        """Whether a step of one token writes the checkpoints, with so many committed records in the window."""
        return not self._conventional and records + 1 > self.session.replay.window

    def save(self, path: Path) -> None:
        """Write what `saved` takes."""
        save_run(path, [self.session.save(slot) for slot in self.slots])

    def step(self, most: int) -> Tensor:
        """Decode the next tokens of every stream, 1..most of them -> logits [rows, n, V], after each token.

        They are on the device and valid until the next step.
        """
        replay = self.session.replay
        flush = self.flushes_next(self.records)
        room = most if self._conventional else replay.window - self.records
        tokens = 1 if flush else min(most, room, replay.max_step_tokens)
        logits = self.steps.run(tokens, flushes=flush)
        self.records = tokens if flush else self.records + tokens
        self.position += tokens
        return logits

    def states(self) -> Tensor:
        """The recurrent states with all committed records applied, [layers, rows, H, P, N] float32."""
        pools, slots = self.session.pools, torch.tensor(self.slots, device=self._model.device)
        return torch.stack([self._layer_states(pools, layer, slots) for layer in pools.ssm])

    def _layer_states(self, pools: StatePools, layer: int, slots: Tensor) -> Tensor:
        state = pools.ssm[layer]
        if isinstance(state, ConventionalLayerState):
            return state.states[slots, pools.cursors.origin[slots].long()]
        if pools.geometry.ssm.kind is SsmKind.GDN:
            return gdn_fold(state, pools.cursors, slots)
        return mamba2_fold(state, pools.cursors, slots, self.decay_rates(layer))

    def decay_rates(self, layer: int) -> Tensor:
        """a = -exp(A_log) [H] of a Mamba-2 layer."""
        return -self._model.weights.vector(f"backbone.layers.{layer}.mixer.A_log").exp()
