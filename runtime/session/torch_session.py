"""The torch session: runs steps over slots, with the CUDA kernels where they serve the pool and with the reference
operations elsewhere. Implements `session.base.Session`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.models import model_of
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.ops.reference import commit
from trtllm_replayssm.ops.reference.rows import check_width, step_rows
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.pools.snapshot import RawArray, Snapshot, from_arrays
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, MtpRow, PrefillChunk, SlotCursors, SlotSnapshot
from trtllm_replayssm.runtime.session.capture import GraphPool
from trtllm_replayssm.runtime.session.device import usable_device
from trtllm_replayssm.runtime.session.integers import INT64, integers
from trtllm_replayssm.runtime.session.native_ops import native_ops, native_prefill
from trtllm_replayssm.runtime.session.padded_rows import padded_rows
from trtllm_replayssm.runtime.session.room import require_room
from trtllm_replayssm.runtime.session.static_step import StaticStep, StepModel
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.torch_graph import TorchGraph, last_tokens
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class _Hidden:
    """Final hidden states [n, hidden] of the tokens a slot's last step committed, from absolute position `start`."""

    start: int
    states: Tensor


@dataclass(frozen=True)
class _Drafting:
    """MTP rows between `mtp_begin` and `mtp_next`: their slots, next absolute positions and last hidden states."""

    slots: Tensor
    position: Tensor
    hidden: Tensor


class TorchSession:
    """One replica on one device.

    state_cache: "replay", or "conventional" (states read and written at every token, one snapshot per drafted token).
    debug: poison everything dead and the rows of padded tokens with NaN in each step, and check the pools after it.
    """

    def __init__(self, weights: TorchWeights, pools: StatePools, *, debug: bool = False) -> None:
        self.geometry = pools.geometry
        self.replay = pools.replay
        self.pool = pools.pool
        self.pools = pools
        self._weights = weights
        self._model = model_of(pools.geometry)
        native = native_ops(pools)
        self._state_ops = StateOps(pools, native, native_prefill(pools, native))
        self._device = pools.cursors.position.device
        self._debug = debug
        self.graphs = GraphPool(self._device)
        self._step: StepRows | None = None
        self._step_hidden: Tensor | None = None
        self._hidden: dict[int, _Hidden] = {}
        self._drafting: _Drafting | None = None

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, replay: ReplayConfig, pool: PoolConfig, *, state_cache: str = "replay",
        device: str = "cpu", debug: bool = False,
    ) -> TorchSession:  # fmt: skip
        """Pools for the checkpoint's geometry; weights are read when first used."""
        if state_cache not in ("replay", "conventional"):
            raise ContractError("TorchSession", "state_cache", expected="replay or conventional", got=state_cache)
        target = usable_device(device)
        weights = TorchWeights(checkpoint, torch_dtype(pool.activation), target)
        pools = StatePools.allocate(
            checkpoint.geometry, replay, pool, conventional=state_cache == "conventional", device=target
        )
        return cls(weights, pools, debug=debug)

    def static_step(self, batch: int, width: int, *, flushes: bool | None = None) -> StaticStep:
        """A step of fixed shape over this session's pools, for work that is captured by `graphs`.

        The session does not see its steps: whoever runs them keeps to the rules of `decode` and `commit`.
        """
        model = StepModel(self._weights, self.pools, self._state_ops, self._debug)
        return StaticStep(model, batch, width, flushes=flushes)

    def allocate(self, seed: int) -> int:
        """See `Session.allocate`."""
        return self.pools.acquire(seed)

    def free(self, slot: int) -> None:
        """See `Session.free`."""
        self._require_settled("free", [slot])
        self.pools.release(slot)
        self._hidden.pop(slot, None)
        self._drafting = None

    @property
    def free_slots(self) -> int:
        """See `Session.free_slots`."""
        return self.pools.slots.num_free

    def fork(self, slot: int, seed: int) -> int:
        """See `Session.fork`."""
        self._require_settled("fork", [slot])
        copy = self.pools.fork(slot, seed)
        if slot in self._hidden:
            self._hidden[copy] = self._hidden[slot]
        return copy

    @property
    def signature(self) -> str:
        """See `Session.signature`."""
        return self.pools.signature

    def save(self, slot: int, since: int = 0) -> SlotSnapshot:
        """See `Session.save`."""
        self._require_settled("save", [slot])
        snapshot, last = self.pools.save(slot, since), self._hidden.get(slot)
        if self.geometry.mtp_pattern and last is not None and len(last.states):
            snapshot = replace(snapshot, hidden=last.states[-1:].cpu().clone())
        return snapshot

    def restore(
        self, snapshot: SlotSnapshot, *, seed: int | None = None, before: Sequence[SlotSnapshot] = ()
    ) -> int:
        """See `Session.restore`."""
        assert isinstance(snapshot, Snapshot), "a snapshot comes from `save`"
        slot = self.pools.restore(snapshot, [part for part in before if isinstance(part, Snapshot)], seed)
        if snapshot.hidden is not None:
            self._hidden[slot] = _Hidden(snapshot.position - 1, snapshot.hidden.to(self._device))
        return slot

    def load_snapshot(self, position: int, arrays: Mapping[str, RawArray], *, prompt_done: bool) -> SlotSnapshot:
        """See `Session.load_snapshot`."""
        snapshot = self.pools.require_snapshot(from_arrays(position, self.signature, arrays))
        if prompt_done and snapshot.carry:
            raise ContractError("load_snapshot", "carry", expected="none (the prompt is complete)", got="one")
        return snapshot

    def cursors(self, slot: int) -> SlotCursors:
        """See `Session.cursors`."""
        registers = [int(r[slot]) for r in self.pools.cursors.tensors()]
        return SlotCursors(registers[0], registers[1], registers[2], registers[3] & (1 << 64) - 1)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Logits | None]:
        """See `Session.prefill`."""
        if not chunks:
            return []
        self._require_settled("prefill", [c.slot for c in chunks])
        require_room(self.pools, "prefill", [(c.slot, len(c.tokens)) for c in chunks], least=1)
        ids, rows = self._rows("prefill", [(c.slot, c.tokens) for c in chunks])
        ctx = self._context(Phase.PREFILL, rows, ids.shape[1], [c.last for c in chunks])
        output = self._forward(ctx, ids)
        commit.finish_chunk(self.pools.cursors, rows.slot, rows.num_tokens)
        results: list[Logits | None] = []
        for i, chunk in enumerate(chunks):
            self._hidden[chunk.slot] = _Hidden(int(ctx.start[i]), output.hidden[i, : len(chunk.tokens)])
            if chunk.last:
                self.pools.carries.pop(chunk.slot, None)
            results.append(output.logits[i, 0].cpu().numpy() if chunk.last else None)
        self._check()
        return results

    @torch.inference_mode()
    def decode(self, rows: Sequence[DecodeRow]) -> list[Logits]:
        """See `Session.decode`."""
        if self._step is not None:
            raise ContractError("decode", "step", expected="commit after the last decode", got="no commit")
        if not rows:
            self._step = StepRows(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
            return []
        real = [(r.slot, len(r.tokens)) for r in rows if r.slot >= 0]
        require_room(self.pools, "decode", real, least=0)
        for slot, _ in real:
            self.pools.require_decodable(slot)
        ids, checked = self._rows("decode", [(r.slot, r.tokens) for r in rows])
        check_width("decode", self.replay, ids.shape[1])
        ctx = self._context(Phase.DECODE, checked, ids.shape[1], [False] * len(rows))
        output = self._forward(ctx, ids)
        self._step, self._step_hidden = checked, output.hidden
        logits = output.logits.cpu().numpy()
        return [logits[i, : len(r.tokens) if r.slot >= 0 else 0] for i, r in enumerate(rows)]

    @torch.inference_mode()
    def commit(self, accepted: Sequence[int]) -> None:
        """See `Session.commit`."""
        rows = self._step
        expected = 0 if rows is None else len(rows.slot)
        if rows is None or len(accepted) != expected:
            raise ContractError(
                "commit", "accepted", expected=f"{expected} counts, one per row of the last decode", got=list(accepted)
            )
        counts = torch.tensor(integers("commit", "accepted", accepted, *INT64), dtype=torch.int64, device=self._device)
        start = self.pools.cursors.position.clone()
        self._state_ops.commit(rows, counts)
        for row in rows.active.tolist():
            assert self._step_hidden is not None
            slot = int(rows.slot[row])
            taken = int(self.pools.cursors.position[slot] - start[slot])
            self._hidden[slot] = _Hidden(int(start[slot]), self._step_hidden[row, :taken])
        self._step = self._step_hidden = None
        self._check()

    @torch.inference_mode()
    def mtp_begin(self, rows: Sequence[MtpRow]) -> list[Logits]:
        """See `Session.mtp_begin`."""
        if not self.geometry.mtp_pattern:
            raise ContractError("mtp_begin", "model", expected="a checkpoint with an MTP head", got=self.geometry.name)
        self._require_settled("mtp_begin", [r.slot for r in rows])
        for row in rows:
            known = self._hidden.get(row.slot)
            if known is None or len(known.states) != len(row.next_tokens):
                raise ContractError(
                    "mtp_begin", f"next_tokens of slot {row.slot}",
                    expected=f"{0 if known is None else len(known.states)} tokens, one per token of its last step",
                    got=len(row.next_tokens),
                )  # fmt: skip
        ids, checked = self._rows("mtp_begin", [(r.slot, r.next_tokens) for r in rows])
        hidden = torch.zeros((*ids.shape, self.geometry.hidden), dtype=torch_dtype(self.pool.activation))
        hidden = hidden.to(self._device)
        for i, row in enumerate(rows):
            hidden[i, : len(row.next_tokens)] = self._hidden[row.slot].states
        start = torch.tensor([self._hidden[r.slot].start for r in rows], device=self._device)
        return self._mtp(checked, ids, hidden, start)

    @torch.inference_mode()
    def mtp_next(self, tokens: Sequence[int]) -> list[Logits]:
        """See `Session.mtp_next`."""
        last = self._drafting
        if last is None or len(tokens) != len(last.slots):
            expected = 0 if last is None else len(last.slots)
            raise ContractError("mtp_next", "tokens", expected=f"{expected}, one per drafting row", got=len(tokens))
        self._require_settled("mtp_next", last.slots.tolist())
        ones = torch.ones_like(last.slots)
        checked = step_rows("mtp_next", last.slots, ones, self.pool.slots, 1)
        drafted = integers("mtp_next", "tokens", tokens, 0, self.geometry.vocab - 1)
        ids = torch.tensor(drafted, dtype=torch.int64, device=self._device)[:, None]
        return self._mtp(checked, ids, last.hidden, last.position)

    def check_integrity(self) -> None:
        """See `Session.check_integrity`."""
        self.pools.check_integrity()

    def _forward(self, ctx: StepContext, ids: Tensor) -> ModelOutput[Tensor]:
        """A pass that fails leaves some layers ahead of others: its slots can only be freed."""
        try:
            return self._model.forward(self._graph(ctx), self.geometry, ids)
        except BaseException:
            self.pools.slots.tear(ctx.rows.active_slot.tolist())
            raise

    def _mtp(self, rows: StepRows, ids: Tensor, hidden: Tensor, start: Tensor) -> list[Logits]:
        everything = torch.ones(len(rows.slot), dtype=torch.bool)
        ctx = StepContext(Phase.PREFILL, rows, start, ids.shape[1], everything)
        output = self._model.mtp_forward(self._graph(ctx), self.geometry, ids, hidden)
        self._drafting = _Drafting(rows.slot, start + rows.num_tokens, last_tokens(output.hidden, ctx))
        return list(output.logits[:, 0].cpu().numpy())

    def _graph(self, ctx: StepContext) -> TorchGraph:
        if self._debug:
            poison_dead_memory(self.pools)
        return TorchGraph(self._weights, self._state_ops, ctx, poison=self._debug)

    def _context(self, phase: Phase, rows: StepRows, width: int, last: list[bool]) -> StepContext:
        start = self.pools.cursors.position[rows.slot.clamp(min=0)].long()
        return StepContext(phase, rows, start, width, torch.tensor(last, device=self._device))

    def _rows(self, operation: str, rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[Tensor, StepRows]:
        return padded_rows(operation, rows, vocab=self.geometry.vocab, slots=self.pool.slots, device=self._device)

    def _require_settled(self, operation: str, slots: list[int]) -> None:
        """No step of these slots awaits its commit: until then a step that flushed counts its records twice."""
        pending = set() if self._step is None else set(self._step.slot.tolist()) - {-1}
        if pending & set(slots):
            raise ContractError(
                operation, "slot", expected="slots whose last decode is committed",
                got=f"slots {sorted(pending & set(slots))} with a step to commit", hint="Call commit first",
            )  # fmt: skip

    def _check(self) -> None:
        if self._debug:
            self.pools.check_integrity()

