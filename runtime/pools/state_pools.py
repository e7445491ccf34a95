"""All state of one replica by slot: cursors, checkpoints, rings, convolution windows and KV caches.

Knows slots, not requests. Carries: while a prompt is being prefilled in several chunks, its recurrent state is kept
in float32 outside the pool and only the last chunk rounds it into the checkpoint; until then the slot cannot decode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError, InvariantError
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.layer_state import ConventionalLayerState, CursorTensors, LayerState, ReplayLayerState
from trtllm_replayssm.runtime.pools.kv_pool import KvLayer
from trtllm_replayssm.runtime.pools.slots import SlotAllocator
from trtllm_replayssm.runtime.pools.snapshot import CARRY, HIDDEN, KV, Snapshot, require_chain, require_like
from trtllm_replayssm.shapes import ModelGeometry


@dataclass
class StatePools:
    """ssm, windows, kv: by absolute layer index. carries: float32 states [H, P, N] by slot and layer."""

    geometry: ModelGeometry
    replay: ReplayConfig
    pool: PoolConfig
    conventional: bool
    slots: SlotAllocator
    cursors: CursorTensors
    ssm: dict[int, LayerState]
    windows: dict[int, Tensor]
    kv: dict[int, KvLayer]
    carries: dict[int, dict[int, Tensor]]

    @staticmethod
    def allocate(
        geometry: ModelGeometry, replay: ReplayConfig, pool: PoolConfig, *, conventional: bool, device: torch.device
    ) -> StatePools:
        """Pools of `pool.slots` slots, all free."""
        act, shape = torch_dtype(pool.activation), geometry.ssm
        ssm: dict[int, LayerState] = {}
        windows: dict[int, Tensor] = {}
        for layer in geometry.ssm_layers:
            if conventional:
                ssm[layer] = ConventionalLayerState.allocate(shape, replay, layer, pool.slots, device)
            else:
                ssm[layer] = ReplayLayerState.allocate(shape, replay, layer, pool.slots, act, device)
            rows = (pool.slots, replay.conv_rows(shape.conv_kernel), shape.conv_channels)
            windows[layer] = torch.zeros(rows, dtype=act, device=device)
        # a drafting head may write up to T_max positions past the last committed one
        depth = pool.max_seq_len + replay.max_step_tokens
        kv = {
            layer: KvLayer.allocate(geometry.attention, pool.slots, depth, act, device) for layer in geometry.kv_layers
        }
        cursors = CursorTensors.allocate(pool.slots, device)
        allocator = SlotAllocator(pool.slots)
        return StatePools(geometry, replay, pool, conventional, allocator, cursors, ssm, windows, kv, {})

    def acquire(self, seed: int) -> int:
        """A free slot with every register reset and zero states. Raises CapacityError when full."""
        if not 0 <= seed < 1 << 64:
            raise ContractError("acquire", "seed", expected="0..2^64 - 1", got=seed)
        slot = self.slots.allocate()
        self._clear(slot)
        # the key is the same 64 bits; torch has no unsigned type
        self.cursors.seed[slot] = seed - (1 << 64) if seed >= 1 << 63 else seed
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self.slots.free(slot)
        self.carries.pop(slot, None)

    def require_decodable(self, slot: int) -> None:
        """Raise ContractError while the slot's prompt is unfinished: its checkpoint means nothing yet."""
        self.slots.require_whole("decode", slot)
        if slot in self.carries:
            raise ContractError(
                "decode", "slot", expected="a slot whose prompt is complete",
                got=f"slot {slot}, prompt in progress", hint="Send its last prompt chunk first",
            )  # fmt: skip

    def save(self, slot: int, since: int = 0) -> Snapshot:
        """Copy a slot to host memory, keys and values from position `since` on.

        While its prompt is in progress the carry is the state; checkpoints and ring mean nothing and are left out.
        """
        self.slots.require_whole("save", slot)
        position = int(self.cursors.position[slot])
        if not 0 <= since <= position:
            raise ContractError("save", "since", expected=f"0..{position}, the slot's position", got=since)
        carry = {layer: state.detach().cpu().clone() for layer, state in self.carries.get(slot, {}).items()}
        rows = self._rows(slot, since, position, states=not carry)
        tensors = {name: view.detach().cpu().clone() for name, view in rows.items()}
        return Snapshot(position, self.signature, tensors, carry, first=since)

    def restore(self, snapshot: Snapshot, before: Sequence[Snapshot] = (), seed: int | None = None) -> int:
        """A new slot with the snapshot's state, and its seed unless one is given. Nothing changes when it does not fit.

        before: the snapshots that hold earlier keys and values, in order; where two overlap, the later one counts.
        """
        if snapshot.signature != self.signature:
            raise ContractError(
                "restore", "snapshot", expected=f"a pool like {snapshot.signature}", got=self.signature,
                hint="Restore into a pool of the same model, window and formats",
            )  # fmt: skip
        if snapshot.position > self.pool.max_seq_len:
            raise ContractError(
                "restore", "snapshot", expected=f"at most max_seq_len = {self.pool.max_seq_len} tokens",
                got=snapshot.position,
            )  # fmt: skip
        require_chain(snapshot, before)
        slot = self.acquire(0 if seed is None else seed)
        try:
            self._fill(slot, snapshot, before, keep_seed=seed is not None)
        except BaseException:
            self.release(slot)  # half-written: nobody may find it in use
            raise
        return slot

    def _fill(self, slot: int, snapshot: Snapshot, before: Sequence[Snapshot], *, keep_seed: bool) -> None:
        key = self.cursors.seed[slot].clone()
        for part in before:
            for name, view in self._kv_rows(slot, part.first, part.position).items():
                view.copy_(part.tensors[name])
        for name, view in self._rows(slot, snapshot.first, snapshot.position, states=not snapshot.carry).items():
            view.copy_(snapshot.tensors[name])
        if keep_seed:
            self.cursors.seed[slot] = key
        if snapshot.carry:
            device = self.cursors.position.device
            self.carries[slot] = {layer: state.to(device, copy=True) for layer, state in snapshot.carry.items()}

    def require_snapshot(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot, when it is whole and has the names, shapes and types of this pool; else ContractError."""
        if not 0 <= snapshot.position <= self.pool.max_seq_len:
            raise ContractError(
                "load_snapshot", "position", expected=f"0..{self.pool.max_seq_len}", got=snapshot.position
            )
        require_like(snapshot.tensors, self._rows(0, 0, snapshot.position, states=not snapshot.carry))
        shape, optional = self.geometry.ssm, snapshot.named().keys() - snapshot.tensors.keys()
        state = torch.empty((shape.heads, shape.head_dim, shape.state_dim), device="meta")
        hidden = torch.empty((1, self.geometry.hidden), dtype=torch_dtype(self.pool.activation), device="meta")
        expected = {f"{CARRY}{layer}": state for layer in self.geometry.ssm_layers} if snapshot.carry else {}
        expected |= {HIDDEN: hidden} if snapshot.hidden is not None else {}
        require_like({name: t for name, t in snapshot.named().items() if name in optional}, expected)
        origin, h, position = (int(snapshot.tensors[f"cursor {i}"]) for i in range(3))
        if position != snapshot.position or not self._in_range(origin, h, position):
            raise ContractError(
                "load_snapshot", "cursors", expected=f"{self._range()}, position {snapshot.position}",
                got=f"origin {origin}, h {h}, position {position}",
            )  # fmt: skip
        return snapshot

    def fork(self, slot: int, seed: int) -> int:
        """A new slot with a copy of another's state and its own seed; the source is only read."""
        self.slots.require_whole("fork", slot)
        copy = self.acquire(seed)
        key = self.cursors.seed[copy].clone()
        position = int(self.cursors.position[slot])
        source = self._rows(slot, 0, position)
        for name, view in self._rows(copy, 0, position).items():
            view.copy_(source[name])
        self.cursors.seed[copy] = key
        if slot in self.carries:
            self.carries[copy] = {layer: state.clone() for layer, state in self.carries[slot].items()}
        return copy

    def slot_hash(self, slot: int) -> str:
        """SHA-256 of everything a slot holds that means something; equal hashes mean equal futures."""
        digest = hashlib.sha256()
        position, in_prompt = int(self.cursors.position[slot]), slot in self.carries
        for name, view in self._rows(slot, 0, position, states=not in_prompt).items():
            digest.update(name.encode())
            digest.update(view.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for layer, state in sorted(self.carries.get(slot, {}).items()):
            digest.update(f"carry {layer}".encode() + state.detach().cpu().numpy().tobytes())
        return digest.hexdigest()

    def nbytes(self) -> dict[str, int]:
        """Device memory by kind."""

        def size(tensors: list[Tensor]) -> int:
            return sum(t.numel() * t.element_size() for t in tensors)

        states = [t for layer in self.ssm.values() for t in layer.tensors()]
        return {
            "recurrent state": size(states),
            "convolution windows": size(list(self.windows.values())),
            "kv": size([t for layer in self.kv.values() for t in layer.tensors()]),
            "cursors": size(self.cursors.tensors()),
        }

    def check_integrity(self) -> None:
        """Slots consistent, cursors of used slots in range, carries only for used slots. Raises InvariantError."""
        self.slots.check_integrity()
        used = self.slots.used
        for slot in sorted(used):
            origin, h, position = (int(r[slot]) for r in self.cursors.tensors()[:3])
            if not self._in_range(origin, h, position):
                raise InvariantError(
                    "check_integrity", f"cursors of slot {slot}", expected=self._range(),
                    got=f"origin {origin}, h {h}, position {position}",
                )  # fmt: skip
        if not self.carries.keys() <= used:
            raise InvariantError(
                "check_integrity", "carries", expected="only slots in use", got=sorted(self.carries.keys() - used)
            )

    @property
    def _origins(self) -> int:
        return self.replay.max_step_tokens + 1 if self.conventional else self.replay.ring_rows

    def _in_range(self, origin: int, h: int, position: int) -> bool:
        known = 0 <= h <= min(self.replay.window, position) and position <= self.pool.max_seq_len
        return known and 0 <= origin < self._origins

    def _range(self) -> str:
        longest = self.pool.max_seq_len
        return f"0 <= origin < {self._origins}, 0 <= h <= {self.replay.window}, h <= position <= {longest}"

    def _clear(self, slot: int) -> None:
        """Zero states and registers. Rings, windows and KV need nothing: what is not committed is never read."""
        for register in self.cursors.tensors():
            register[slot] = 0
        for state in self.ssm.values():
            if isinstance(state, ConventionalLayerState):
                state.states[slot] = 0.0
                continue
            state.checkpoint.clear(slot)
            if state.read_copy is not None:
                state.read_copy.clear(slot)

    def _rows(self, slot: int, since: int, position: int, *, states: bool = True) -> dict[str, Tensor]:
        """Views of what the slot holds; keys and values of positions [since, position). states: checkpoints, rings."""
        rows: dict[str, Tensor] = {
            f"cursor {i}": register[slot : slot + 1] for i, register in enumerate(self.cursors.tensors())
        }
        for layer, state in self.ssm.items():
            if states:
                rows |= {f"ssm {layer} {i}": t[slot] for i, t in enumerate(state.tensors())}
            rows[f"window {layer}"] = self.windows[layer][slot]
        return rows | self._kv_rows(slot, since, position)

    def _kv_rows(self, slot: int, since: int, position: int) -> dict[str, Tensor]:
        rows: dict[str, Tensor] = {}
        for layer, kv in self.kv.items():
            rows |= {f"{KV}{layer} {i}": t[slot, :, since:position] for i, t in enumerate(kv.tensors())}
        return rows

    @property
    def signature(self) -> str:
        """Model, formats and shapes in words."""
        shapes = hashlib.sha256(repr(self.geometry).encode()).hexdigest()[:12]
        model = f"{self.geometry.name} (shapes {shapes})"
        return f"{model}, {self.replay}, {self.pool.activation.value}, conventional={self.conventional}"
