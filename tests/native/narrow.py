"""What the GPU tests of narrow states share: layer state on the CPU, a copy on the device, one step on both.

Oracle: the package's reference operations (ops/reference, float32 on the CPU), which start each step from the bits the
device has, so that every step is judged alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.native.twin import output_bound_of
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.launches import UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState
from trtllm_replayssm.ops.reference.gdn import gdn_update, key_factor
from trtllm_replayssm.ops.reference.mamba2 import mamba2_update
from trtllm_replayssm.ops.reference.rows import step_rows
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.ops.views import view
from trtllm_replayssm.shapes import SsmKind, SsmShape

FP32, FP16, FP8, FP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4
FORMATS = [(FP32, FP16), (FP32, FP8), (FP32, FP4), (FP16, None), (FP16, FP8), (FP16, FP4), (FP8, None), (FP8, FP4)]
CASES = [pytest.param(r, q, id=f"{r.value}-{q.value if q else 'shared'}") for r, q in FORMATS]

LAYER = 11
CHECKPOINT_BOUND = {False: 2e-6, True: 1e-5}  # of a float32 head's largest value; GDN derives its corrections first
# What both sides' float32 sums may lose of an output, in units of the head's largest (bench/rounding.py), by family:
# corrections of GDN may lie on the other side of a float16 border, which moves the outputs by their last bit.
OUTPUT_SHARE = {False: 5e-6, True: 2.0**-11}
# Share of codes that may be the neighbour of the reference's, where the two float32 folds differ in their last bits: of
# a float16 step such a bit is 2^-13, of the others' steps less.
NEIGHBOURS = {StateFormat.FLOAT16: 1e-2, StateFormat.FP8: 1e-3, StateFormat.NVFP4: 1e-3}


def config(recurrence: StateFormat, read: StateFormat | None, window: int = 16, tokens: int = 1) -> ReplayConfig:
    return ReplayConfig(window=window, max_step_tokens=tokens, recurrence=recurrence, read=read)


def store_tensors(store: StateStore | None, name: str) -> dict[str, Any]:
    if store is None:
        return {}
    parts = {name: store.data, f"{name}_scale": store.block_scale}
    if name == "read":
        parts["read_head_scale"] = store.head_scale
    return {key: value for key, value in parts.items() if value is not None}


def state_tensors(state: ReplayLayerState) -> dict[str, Any]:
    """The ABI's tensors of a layer's state by field name."""
    ring = {
        "ring_value": state.ring_value,
        "ring_k": state.ring_key,
        "ring_dt": state.ring_decay,
        "ring_key_factor": state.ring_key_factor,
        "ring_v": state.ring_v,
        "ring_beta": state.ring_beta,
    }
    ring = {name: tensor for name, tensor in ring.items() if tensor is not None}
    return {**store_tensors(state.checkpoint, "checkpoint"), **store_tensors(state.read_copy, "read"), **ring}


def codes(tensor: Any, name: str) -> np.ndarray[Any, Any]:
    """Codes of a copy or of its scales as integers in the order of the numbers they mean."""
    import torch

    host = tensor.cpu()
    if host.dtype is torch.uint8:
        packed = host.numpy()
        nibbles = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int64)
        return np.asarray(np.where(nibbles & 8, -(nibbles & 7), nibbles & 7))
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32}[host.element_size()]
    bits = host.contiguous().view(width).numpy().astype(np.int64)
    top = 1 << (8 * host.element_size() - 1)
    return np.asarray(np.where(bits < 0, -(bits + top), bits))


@dataclass
class NarrowTwin:
    """One layer's pool on the CPU, with its copy on the device; every call compares the two."""

    native: _abi.Library
    shape: SsmShape
    config: ReplayConfig
    act: str
    slots: int
    seed: int = 3
    asked: UpdateLaunch | None = None  # of the library, instead of its own choice
    flags: int = 0  # of every update

    def __post_init__(self) -> None:
        import torch

        self.rng = np.random.default_rng(self.seed)
        self.gdn = self.shape.kind is SsmKind.GDN
        self.dtype = getattr(torch, self.act)
        cpu = torch.device("cpu")
        self.state = ReplayLayerState.allocate(self.shape, self.config, LAYER, self.slots, self.dtype, cpu)
        self.cursors = CursorTensors.allocate(self.slots, cpu)
        self.a = torch.from_numpy(-self.rng.uniform(0.2, 16.0, self.shape.heads).astype(np.float32))
        self.skip = torch.from_numpy(self.rng.standard_normal(self.shape.heads).astype(np.float32))
        self.workspace = torch.zeros(256, dtype=torch.uint8, device="cuda")
        self.different = {fmt: [0, 0] for fmt in NEIGHBOURS}
        self.poison()

    def poison(self) -> None:
        """Nothing may read what no request wrote."""
        for ring in self.state.ring_tensors():
            ring.fill_(float("nan"))

    def normal(self, *size: int) -> Any:
        import torch

        return torch.from_numpy(self.rng.standard_normal(size).astype(np.float32))

    def admit(self, slot: int, h: int, origin: int, state: Any = None) -> None:
        """A sequence with a state [H, P, N] (random by default) and `h` committed records from ring row `origin`."""
        import torch

        s = self.shape
        states = self.normal(1, s.heads, s.head_dim, s.state_dim) if state is None else state[None]
        # magnitudes as of real states: rows and columns of very different size, some blocks zero
        if state is None:
            states *= torch.exp2(self.normal(1, s.heads, s.head_dim, 1)) * torch.exp2(self.normal(1, 1, 1, 128))
            states[:, :, ::7, 32:64] = 0.0
        self.state.checkpoint.store([slot], states, Rounding.NEAREST, [None])
        if self.state.read_copy is not None:
            self.state.read_copy.store([slot], states, Rounding.NEAREST, [None])
        self.cursors.h[slot], self.cursors.origin[slot] = h, origin
        self.cursors.position[slot] = int(self.rng.integers(h, 100_000))
        self.cursors.seed[slot] = int(self.rng.integers(-(2**63), 2**63))
        for j in range(h):
            row = (origin + j) % self.config.ring_rows
            self.state.ring_value[slot, :, row] = self.normal(s.heads, s.head_dim).to(self.state.ring_value.dtype)
            self.state.ring_key[slot, :, row] = self.normal(s.groups, s.state_dim).to(self.dtype)
            self.state.ring_decay[slot, :, row] = -self.step_sizes(s.heads) if self.gdn else self.step_sizes(s.heads)
            if self.state.ring_key_factor is not None:
                self.state.ring_key_factor[slot, :, row] = key_factor(self.state.ring_key[slot, :, row])
            if self.state.ring_v is not None and self.state.ring_beta is not None:
                self.state.ring_v[slot, :, row] = self.normal(s.heads, s.head_dim).to(self.dtype)
                self.state.ring_beta[slot, :, row] = torch.from_numpy(self.rng.uniform(size=s.heads).astype(np.float32))

    def step_sizes(self, *size: int) -> Any:
        import torch

        return torch.from_numpy(np.exp(self.rng.uniform(-7, -1, size)).astype(np.float32))

    def inputs(self, slots: list[int], counts: list[int], tokens: int) -> dict[str, Any]:
        """Random tokens; NaN where a row has none."""
        s, b = self.shape, len(slots)
        rows = {
            "value": self.normal(b, tokens, s.heads, s.head_dim).to(self.dtype),
            "k": self.normal(b, tokens, s.groups, s.state_dim).to(self.dtype),
            "q": self.normal(b, tokens, s.groups, s.state_dim).to(self.dtype),
        }
        if self.gdn:
            rows["log_decay"] = -self.step_sizes(b, tokens, s.heads)
            rows["beta"] = self.step_sizes(b, tokens, s.heads)
        else:
            rows["dt"] = self.step_sizes(b, tokens, s.heads)
        for tensor in rows.values():
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                tensor[row, count if slot >= 0 else 0 :] = float("nan")
        return rows

    def step(self, slots: list[int], counts: list[int], tokens: int, rows: dict[str, Any] | None = None) -> None:
        """One update on both sides from the same bits, compared; both go on from the device's."""
        import torch

        rows = self.inputs(slots, counts, tokens) if rows is None else rows
        device = {name: tensor.cuda() for name, tensor in state_tensors(self.state).items()}
        got = self.launch(device, rows, slots, counts)
        flushed = [s for s, n in zip(slots, counts, strict=True) if s >= 0 and n > 0 and self.flushes(s, n)]
        chosen = step_rows("step", torch.tensor(slots), torch.tensor(counts), self.slots, tokens)
        clean = {name: torch.nan_to_num(tensor) for name, tensor in rows.items()}
        x, k, q = clean["value"], clean["k"], clean["q"]
        if self.gdn:
            expected = gdn_update(self.state, self.cursors, chosen, q, k, x, clean["log_decay"], clean["beta"])
        else:
            expected = mamba2_update(self.state, self.cursors, chosen, x, k, q, clean["dt"], self.a, d_skip=self.skip)
        self.check_output(got.float().cpu().numpy(), expected.numpy(), slots, counts)
        self.check_state(device, flushed)
        for name, tensor in state_tensors(self.state).items():
            bits = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
            tensor.view(bits).copy_(device[name].view(bits).cpu())

    def flushes(self, slot: int, count: int) -> bool:
        return int(self.cursors.h[slot]) + count > self.config.window

    def launch(self, device: dict[str, Any], rows: dict[str, Any], slots: list[int], counts: list[int]) -> Any:
        import torch

        inputs = {name: tensor.cuda() for name, tensor in rows.items()}
        registers = {n: getattr(self.cursors, n).cuda() for n in ("origin", "h", "position", "seed")}
        indices = {"slot": torch.tensor(slots, dtype=torch.int32), "num_tokens": torch.tensor(counts).int()}
        out = torch.full_like(inputs["value"], float("nan"))
        tensors = {**device, **inputs, **registers, **{n: t.cuda() for n, t in indices.items()}}
        tensors |= {"out": out} if self.gdn else {"a": self.a.cuda(), "skip": self.skip.cuda(), "out": out}
        args = _abi.UpdateArgs(
            kind=int(_abi.Kind.GDN if self.gdn else _abi.Kind.MAMBA2), window=self.config.window, layer=LAYER,
            flags=self.flags, launch=_abi.LaunchConstants(*([] if self.asked is None else self.asked.numbers)),
            **{name: view(tensor) for name, tensor in tensors.items()},
        )  # fmt: skip
        stream = int(torch.cuda.current_stream().cuda_stream)
        self.native.update(args, self.workspace.data_ptr(), self.workspace.numel(), stream)
        torch.cuda.synchronize()
        return out

    def check_output(self, got: Any, expected: Any, slots: list[int], counts: list[int]) -> None:
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            live = count if slot >= 0 else 0
            assert (got[row, live:] == 0).all(), "tokens beyond num_tokens are zero"
            largest = np.abs(expected[row, :live]).max(axis=-1, keepdims=True, initial=0.0)
            wanted = expected[row, :live]
            largest = np.broadcast_to(largest, wanted.shape)
            bound = output_bound_of(self.act, wanted, largest, OUTPUT_SHARE[self.gdn])
            error = np.abs(got[row, :live] - wanted)
            assert (error <= bound).all(), (row, slot, count, float(np.nanmax(error / bound)))

    def check_state(self, device: dict[str, Any], flushed: list[int]) -> None:
        """Rings and slots that did not flush to the bit; flushed copies to the code, or its neighbour now and then."""
        for name, tensor in state_tensors(self.state).items():
            got, expected = codes(device[name], name), codes(tensor, name)
            if self.gdn and name in ("ring_value", "ring_key_factor"):
                self.check_close(name, device[name].cpu().float().numpy(), tensor.float().numpy())
                continue
            kept = [slot for slot in range(self.slots) if name.startswith("ring") or slot not in flushed]
            assert (got[kept] == expected[kept]).all(), name
            if name.startswith("ring") or not flushed:
                continue
            if str(tensor.dtype) == "torch.float32":
                self.check_floats(name, device[name][flushed].cpu().numpy(), tensor[flushed].numpy())
                continue
            distance = np.abs(got[flushed] - expected[flushed])
            far = distance > 1
            if str(tensor.dtype) == "torch.float16":
                # Where large terms cancel, float16's steps are finer than the terms' last float32 bits.
                values, others = device[name][flushed].cpu().float().numpy(), tensor[flushed].float().numpy()
                noise = CHECKPOINT_BOUND[self.gdn] * np.abs(others).max(axis=(2, 3), keepdims=True)
                far &= np.abs(values - others) > noise
            assert not far.any(), (name, int(distance[far].max()), int(far.sum()), far.size)
            if "scale" not in name:
                fmt = self.config.recurrence if name == "checkpoint" else self.config.read
                assert fmt is not None
                self.different[fmt][0] += int((distance != 0).sum())
                self.different[fmt][1] += distance.size

    def check_floats(self, name: str, got: Any, expected: Any) -> None:
        axes = (2, 3) if name == "checkpoint" else tuple(range(expected.ndim))[expected.ndim :]
        largest = np.abs(expected).max(axis=axes, keepdims=True) if axes else np.abs(expected)
        error = np.abs(got - expected) / np.maximum(largest, 1e-30)
        assert (error <= CHECKPOINT_BOUND[self.gdn]).all(), (name, float(error.max()))

    def check_close(self, name: str, got: Any, expected: Any) -> None:
        """Corrections to the last bit of their float16 or of the float32 sums before it, factors to float32's."""
        assert (np.isnan(got) == np.isnan(expected)).all(), name
        got, expected = np.nan_to_num(got), np.nan_to_num(expected)
        bound = 2.0**-10 * np.abs(expected) + 1e-5 if name == "ring_value" else 1e-6 * np.abs(expected)
        assert (np.abs(got - expected) <= bound).all(), (name, float((np.abs(got - expected) - bound).max()))

    def check_neighbours(self) -> None:
        for fmt, (different, total) in self.different.items():
            assert different <= NEIGHBOURS[fmt] * total, (fmt, different, total)
