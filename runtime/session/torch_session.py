"""The torch session: runs steps over slots, with the CUDA kernels where they serve the pool and with the reference
operations elsewhere. Implements `session.base.Session`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trtllm_replayssm.config import EVERY_BATCH, CudaGraphConfig, PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.ops.reference import commit
from trtllm_replayssm.ops.reference.rows import check_width
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.pools.snapshot import RawArray, Snapshot
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, MtpRow, PrefillChunk, SlotCursors, SlotSnapshot
from trtllm_replayssm.runtime.session.capture import GraphPool, Recording
from trtllm_replayssm.runtime.session.decode_steps import DecodeSteps
from trtllm_replayssm.runtime.session.device import usable_device
from trtllm_replayssm.runtime.session.graph_sizes import recorded_sizes
from trtllm_replayssm.runtime.session.integers import INT64, integers
from trtllm_replayssm.runtime.session.logits_buffer import LogitsBuffer
from trtllm_replayssm.runtime.session.mtp_head import MtpHead
from trtllm_replayssm.runtime.session.native_ops import native_ops, native_prefill, waits_for_nothing
from trtllm_replayssm.runtime.session.network import Network, TorchNetwork
from trtllm_replayssm.runtime.session.padded_rows import padded_rows, passes
from trtllm_replayssm.runtime.session.positions import Positions
from trtllm_replayssm.runtime.session.ranks import Ranks
from trtllm_replayssm.runtime.session.room import require_room
from trtllm_replayssm.runtime.session.slot_states import SlotStates
from trtllm_replayssm.runtime.session.static_step import StaticStep, StepModel
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.shard import CheckpointShard


class TorchSession:
    """One replica on one device. state_cache: "replay", or "conventional" (states read and written at every token, one
    snapshot per drafted token).
    debug: poison everything dead and the rows of padded tokens with NaN in each step, and check the pools after it.
    """

    def __init__(
        self, weights: TorchWeights, pools: StatePools, *, debug: bool = False,
        cuda_graphs: CudaGraphConfig | None = EVERY_BATCH,
    ) -> None:  # fmt: skip
        """cuda_graphs: what is recorded on a GPU; steps are where the kernels serve the pools. None: nothing is."""
        self.geometry, self.replay, self.pool, self.pools = pools.geometry, pools.replay, pools.pool, pools
        self._weights = weights
        native = native_ops(pools)
        self._state_ops = StateOps(pools, native, native_prefill(pools, native))
        self._device, self._debug = pools.cursors.position.device, debug
        self._recording = Recording()
        network = self._network()
        self.rows_for = network.rows_for  # slots -> rows that a static step over them needs
        self._model = StepModel(network, pools, self._state_ops)
        wanted = cuda_graphs is not None
        self.graphs = GraphPool(self._device, enabled=wanted, recording=self._recording, obstacle=network.obstacle)
        able = self.graphs.records and waits_for_nothing(pools, native)
        self.recorded = sizes = recorded_sizes(cuda_graphs if able else None, self.pool.slots)
        longest = max(sizes.sizes, default=0) * self.replay.max_step_tokens
        logits = LogitsBuffer(longest, self.geometry.vocab, self._device)
        self._head = MtpHead(self._model, self.graphs, sizes, logits)
        self._steps = DecodeSteps(self._model, self.graphs, sizes, logits, self._head.remember)
        self._positions = Positions(pools.cursors)
        self._slots = SlotStates(pools, self._positions, self._head)
        self._step: StepRows | None = None  # on the host

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, replay: ReplayConfig, pool: PoolConfig, *, state_cache: str = "replay",
        device: str = "cpu", debug: bool = False, cuda_graphs: CudaGraphConfig | None = EVERY_BATCH,
        ranks: Ranks | None = None,
    ) -> TorchSession:  # fmt: skip
        """Pools for the checkpoint's geometry, or for the rank's share of it; weights are read when first used."""
        if state_cache not in ("replay", "conventional"):
            raise ContractError("TorchSession", "state_cache", expected="replay or conventional", got=state_cache)
        target = usable_device(device)
        own = checkpoint if ranks is None else CheckpointShard(checkpoint, ranks.parallel)
        weights = TorchWeights(own, torch_dtype(pool.activation), target, ranks=ranks)
        pools = StatePools.allocate(own.geometry, replay, pool, conventional=state_cache != "replay", device=target)
        return cls(weights, pools, debug=debug, cuda_graphs=cuda_graphs)

    def warm_up(self) -> None:
        """See `Session.warm_up`."""
        self._require_settled("warm_up", sorted(self.pools.slots.used))
        if self._device.type == "cuda" and self.free_slots:
            slot = self.allocate(0)  # a prompt in two chunks, so that both kinds of chunk have run
            for last in (False, True):
                self.prefill([PrefillChunk(slot, [0], last)])
            self.free(slot)
        self._steps.warm_up()
        self._head.warm_up()

    def static_step(self, batch: int, width: int, *, flushes: bool | None = None) -> StaticStep:
        """A step of fixed shape over this session's pools, for work that is captured by `graphs`; batch: `rows_for` its
        slots or more. The session does not see its steps: whoever runs them keeps to the rules of `decode` and
        `commit`, and calls `moved` before the session's own methods see the slots again.
        """
        return StaticStep(self._model, batch, width, flushes=flushes)

    def moved(self, slots: Sequence[int]) -> None:
        """Static steps have moved these slots; nothing is drafted from them before a step of the session's own."""
        self._slots.moved(slots)

    def allocate(self, seed: int) -> int:
        """See `Session.allocate`."""
        return self._slots.acquire(seed)

    def free(self, slot: int) -> None:
        """See `Session.free`."""
        self._require_settled("free", [slot])
        self._slots.release(slot)

    @property
    def free_slots(self) -> int:
        """See `Session.free_slots`."""
        return self.pools.slots.num_free

    def fork(self, slot: int, seed: int) -> int:
        """See `Session.fork`."""
        self._require_settled("fork", [slot])
        return self._slots.fork(slot, seed)

    @property
    def signature(self) -> str:
        """See `Session.signature`."""
        return self.pools.signature

    def save(self, slot: int, since: int = 0) -> SlotSnapshot:
        """See `Session.save`."""
        self._require_settled("save", [slot])
        return self._slots.save(slot, since)

    def restore(
        self, snapshot: SlotSnapshot, *, seed: int | None = None, before: Sequence[SlotSnapshot] = ()
    ) -> int:
        """See `Session.restore`."""
        assert isinstance(snapshot, Snapshot), "a snapshot comes from `save`"
        return self._slots.restore(snapshot, [part for part in before if isinstance(part, Snapshot)], seed)

    def load_snapshot(self, position: int, arrays: Mapping[str, RawArray], *, prompt_done: bool) -> SlotSnapshot:
        """See `Session.load_snapshot`."""
        return self._slots.load(position, arrays, prompt_done=prompt_done)

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
        require_room(self.pools, self._positions, "prefill", [(c.slot, len(c.tokens)) for c in chunks], least=1)
        ids, host = self._rows("prefill", [(c.slot, c.tokens) for c in chunks])
        results: dict[int, Logits | None] = {}
        gains = [(not c.last) - (c.slot in self.pools.carries) for c in chunks]
        with self._whole_or_torn(host):
            for part in passes(host.num_tokens.tolist(), gains):
                rows = StepRows(host.slot[part], host.num_tokens[part])
                logits = self._prompt_pass(ids[part, : int(rows.num_tokens.max())], rows, [chunks[i] for i in part])
                results.update(zip(part, logits, strict=True))
        self._check()
        return [results[i] for i in range(len(chunks))]

    def _prompt_pass(self, ids: Tensor, host: StepRows, chunks: Sequence[PrefillChunk]) -> list[Logits | None]:
        rows = StepRows(host.slot.to(self._device), host.num_tokens.to(self._device))
        start = self.pools.cursors.position[rows.slot].long()
        last = torch.tensor([c.last for c in chunks], device=self._device)
        ctx = StepContext(Phase.PREFILL, rows, start, ids.shape[1], last)
        output = self._model.network.forward(ctx, ids.to(self._device))
        commit.finish_chunk(self.pools.cursors, rows.slot, rows.num_tokens)
        results: list[Logits | None] = []
        for i, chunk in enumerate(chunks):
            self._head.keep_chunk(chunk.slot, self._positions.of(chunk.slot), output.hidden[i, : len(chunk.tokens)])
            self._positions.advance(chunk.slot, len(chunk.tokens))
            if chunk.last:
                self.pools.carries.pop(chunk.slot, None)
            results.append(output.logits[i, 0].cpu().numpy() if chunk.last else None)
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
        require_room(self.pools, self._positions, "decode", real, least=0)
        for slot, _ in real:
            self.pools.require_decodable(slot)
        ids, host = self._rows("decode", [(r.slot, r.tokens) for r in rows])
        check_width("decode", self.replay, ids.shape[1])
        with self._whole_or_torn(host):
            logits = self._steps.run(ids, host).cpu().numpy()
        self._step = host
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
        asked, present = integers("commit", "accepted", accepted, *INT64), rows.num_tokens.tolist()
        taken = [min(max(count, 0), most) for count, most in zip(asked, present, strict=True)]
        if expected:
            self._steps.commit(taken)
        for slot, count, most in zip(rows.slot.tolist(), taken, present, strict=True):
            if slot >= 0 and most > 0:
                self._head.commit(slot, self._positions.of(slot), count)
                self._positions.advance(slot, count)
        self._step = None
        self._check()

    @torch.inference_mode()
    def mtp_begin(self, rows: Sequence[MtpRow]) -> list[Logits]:
        """See `Session.mtp_begin`."""
        if not self._head.present:
            raise ContractError("mtp_begin", "model", expected="a checkpoint with an MTP head", got=self.geometry.name)
        self._require_settled("mtp_begin", [r.slot for r in rows])
        for row in rows:
            known = self._head.known(row.slot)
            if known is None or known != len(row.next_tokens):
                raise ContractError(
                    "mtp_begin", f"next_tokens of slot {row.slot}",
                    expected=f"{known or 0} tokens, one per token of its last step", got=len(row.next_tokens),
                )  # fmt: skip
            self.pools.slots.require_whole("mtp_begin", row.slot)
        ids, host = self._rows("mtp_begin", [(r.slot, r.next_tokens) for r in rows])
        self._poison()
        return list(self._head.begin(ids, host).cpu().numpy())

    @torch.inference_mode()
    def mtp_next(self, tokens: Sequence[int]) -> list[Logits]:
        """See `Session.mtp_next`."""
        slots = self._head.drafting
        if not slots or len(tokens) != len(slots):
            raise ContractError("mtp_next", "tokens", expected=f"{len(slots)}, one per drafting row", got=len(tokens))
        self._require_settled("mtp_next", slots)
        drafted = integers("mtp_next", "tokens", tokens, 0, self.geometry.vocab - 1)
        self._poison()
        return list(self._head.next(torch.tensor(drafted, dtype=torch.int64)).cpu().numpy())

    def check_integrity(self) -> None:
        """See `Session.check_integrity`."""
        self.pools.check_integrity()

    def close(self) -> None:
        """See `Session.close`: nothing does."""

    def _network(self) -> Network:
        return TorchNetwork(self.pools, self._weights, self._state_ops, poison=self._debug)

    @contextmanager
    def _whole_or_torn(self, rows: StepRows) -> Iterator[None]:
        """A pass that fails leaves some layers ahead of others: its slots can only be freed."""
        self._poison()
        try:
            yield
        except BaseException:
            self.pools.slots.tear(rows.active_slot.tolist())
            raise

    def _rows(self, operation: str, rows: Sequence[tuple[int, Sequence[int]]]) -> tuple[Tensor, StepRows]:
        return padded_rows(operation, rows, vocab=self.geometry.vocab, slots=self.pool.slots)

    def _require_settled(self, operation: str, slots: list[int]) -> None:
        """No step of these slots awaits its commit: until then a step that flushed counts its records twice."""
        pending = set() if self._step is None else set(self._step.slot.tolist()) - {-1}
        if pending & set(slots):
            raise ContractError(
                operation, "slot", expected="slots whose last decode is committed",
                got=f"slots {sorted(pending & set(slots))} with a step to commit", hint="Call commit first",
            )  # fmt: skip

    def _poison(self) -> None:
        if self._debug:
            poison_dead_memory(self.pools)

    def _check(self) -> None:
        if self._debug:
            self.pools.check_integrity()

