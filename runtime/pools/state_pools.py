"""All state of one replica by slot: cursors, checkpoints, rings, convolution windows and KV caches.

Knows slots, not requests. Carries: while a prompt is being prefilled in several chunks, its recurrent state is kept
in float32 outside the pool and only the last chunk rounds it into the checkpoint; until then the slot cannot decode.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ContractError, InvariantError
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.layer_state import ConventionalLayerState, CursorTensors, LayerState, ReplayLayerState
from trtllm_replayssm.runtime.pools.kv_pool import KvLayer
from trtllm_replayssm.runtime.pools.slots import SlotAllocator
from trtllm_replayssm.runtime.pools.snapshot import Snapshot
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
        self.slots.require_used("decode", slot)
        if slot in self.carries:
            raise ContractError(
                "decode", "slot", expected="a slot whose prompt is complete",
                got=f"slot {slot}, prompt in progress", hint="Send its last prompt chunk first",
            )  # fmt: skip

    def save(self, slot: int) -> Snapshot:
        """Copy a slot to host memory."""
        self.slots.require_used("save", slot)
        tensors = {name: view.detach().cpu().clone() for name, view in self._rows(slot).items()}
        carry = {layer: state.detach().cpu().clone() for layer, state in self.carries.get(slot, {}).items()}
        return Snapshot(int(self.cursors.position[slot]), self._signature(), tensors, carry)

    def restore(self, snapshot: Snapshot) -> int:
        """A new slot with the snapshot's state, seed included. Nothing changes when it does not fit."""
        if snapshot.signature != self._signature():
            raise ContractError(
                "restore", "snapshot", expected=f"a pool like {snapshot.signature}", got=self._signature(),
                hint="Restore into a pool of the same model, window and formats",
            )  # fmt: skip
        if snapshot.position > self.pool.max_seq_len:
            raise ContractError(
                "restore", "snapshot", expected=f"at most max_seq_len = {self.pool.max_seq_len} tokens",
                got=snapshot.position,
            )  # fmt: skip
        slot = self.acquire(0)
        for register in self.cursors.tensors():
            register[slot] = 0
        self.cursors.position[slot] = snapshot.position
        for name, view in self._rows(slot).items():
            view.copy_(snapshot.tensors[name])
        if snapshot.carry:
            device = self.cursors.position.device
            self.carries[slot] = {layer: state.to(device, copy=True) for layer, state in snapshot.carry.items()}
        return slot

    def fork(self, slot: int, seed: int) -> int:
        """A new slot with a copy of another's state and its own seed; the source is only read."""
        self.slots.require_used("fork", slot)
        copy = self.acquire(seed)
        key = self.cursors.seed[copy].clone()
        self.cursors.position[copy] = self.cursors.position[slot]
        source = self._rows(slot)
        for name, view in self._rows(copy).items():
            view.copy_(source[name])
        self.cursors.seed[copy] = key
        if slot in self.carries:
            self.carries[copy] = {layer: state.clone() for layer, state in self.carries[slot].items()}
        return copy

    def slot_hash(self, slot: int) -> str:
        """SHA-256 of everything a slot holds that means something; equal hashes mean equal futures."""
        digest = hashlib.sha256()
        for name, view in self._rows(slot).items():
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
        used, config = self.slots.used, self.replay
        rows = config.max_step_tokens + 1 if self.conventional else config.ring_rows
        for slot in sorted(used):
            origin, h = int(self.cursors.origin[slot]), int(self.cursors.h[slot])
            position = int(self.cursors.position[slot])
            longest = self.pool.max_seq_len
            if not (0 <= origin < rows and 0 <= h <= config.window and h <= position <= longest):
                raise InvariantError(
                    "check_integrity", f"cursors of slot {slot}",
                    expected=f"0 <= origin < {rows}, 0 <= h <= {config.window}, h <= position <= {longest}",
                    got=f"origin {origin}, h {h}, position {position}",
                )  # fmt: skip
        if not self.carries.keys() <= used:
            raise InvariantError(
                "check_integrity", "carries", expected="only slots in use", got=sorted(self.carries.keys() - used)
            )

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

    def _rows(self, slot: int) -> dict[str, Tensor]:
        """Views of everything the slot holds; KV up to its position."""
        position = int(self.cursors.position[slot])
        rows: dict[str, Tensor] = {
            f"cursor {i}": register[slot : slot + 1] for i, register in enumerate(self.cursors.tensors())
        }
        for layer, state in self.ssm.items():
            rows |= {f"ssm {layer} {i}": t[slot] for i, t in enumerate(state.tensors())}
            rows[f"window {layer}"] = self.windows[layer][slot]
        for layer, kv in self.kv.items():
            rows |= {f"kv {layer} {i}": t[slot, :, :position] for i, t in enumerate(kv.tensors())}
        return rows

    def _signature(self) -> str:
        shapes = hashlib.sha256(repr(self.geometry).encode()).hexdigest()[:12]
        model = f"{self.geometry.name} (shapes {shapes})"
        return f"{model}, {self.replay}, {self.pool.activation.value}, conventional={self.conventional}"
