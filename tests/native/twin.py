"""A pool on the device and the float64 specification beside it, driven by the same steps and compared after each.

Oracle: spec/replay.py. Outputs keep to the bound of bench/rounding.py, for the least loss that float32 is granted;
checkpoints to 2e-6 of the head's largest value and fold. A GDN correction is compared with the float64 one that follows
from the same earlier corrections, before its rounding: a value on the other side of a float16 border would otherwise
change the later tokens of its step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.native import harness
from trtllm_replayssm.bench.rounding import STEP_OPERANDS, TYPES, output_bound
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import FP16_MAX
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec import cursors as spec_cursors
from trtllm_replayssm.spec.cursors import Cursors
from trtllm_replayssm.spec.replay import Record, ReplayLayer, StepInputs, decay_sums, read_out
from trtllm_replayssm.spec.ssm import l2_norm_factor, to_heads

CHECKPOINT_BOUND = 2e-6  # of the head's largest value: float32 fold; a TF32 or BF16 operand gives 4e-4 and more
# A correction is a difference of numbers as large as the head's largest one; its float32 error is relative to those, at
# most twice this share. A BF16 or TF32 operand in place of the split state would be off by 2^-9 or 2^-11.
CANCELLATION = 2.0**-18


def torch_module() -> Any:
    import torch

    return torch


def output_bound_of(act: str, exact: Any, magnitude: Any, share: float) -> Any:
    """`bench.rounding.output_bound` of numpy arrays."""
    torch = torch_module()
    tensors = (torch.from_numpy(np.array(array, np.float64)) for array in (exact, magnitude))
    return output_bound(*tensors, TYPES[getattr(torch, act)], share).numpy()


def read_size(shape: SsmShape, source: Any, records: list[Record], vectors: Any) -> Any:
    """[H, P]: the sum of the magnitudes of the terms of `spec.replay.read_out`, with no decay behind the newest."""
    sizes, decays = np.abs(vectors), np.exp(np.array(decay_sums(records, np.zeros(shape.heads))))
    own = decays[0][:, None] * np.einsum("hpn,hn->hp", np.abs(source), sizes)
    if not records:
        return own
    keys = to_heads(shape, np.abs(np.stack([r.key * r.key_factor[:, None] for r in records])))
    values = np.stack([r.value if r.weight is None else r.weight[:, None] * r.value for r in records])
    return own + np.einsum("rh,rhp->hp", decays[1:] * (keys * sizes).sum(-1), np.abs(values))


class FollowingLayer(ReplayLayer):
    """The specification, going on from the corrections the device made, after checking each."""

    given: list[Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.magnitudes: list[Any] = []  # [H, P] of each output since it was emptied: the sum of its terms' magnitudes

    def _output(self, source: Any, records: list[Record], q: Any) -> Any:
        scale = l2_norm_factor(q)[:, None] / np.sqrt(self.shape.state_dim) if self.shape.kind is SsmKind.GDN else 1.0
        self.magnitudes.append(read_size(self.shape, source, records, to_heads(self.shape, q * scale)))
        return super()._output(source, records, q)

    def _correction(self, source: Any, records: list[Record], record: Record) -> Any:
        assert record.v is not None and record.beta is not None
        keys = to_heads(self.shape, record.key * record.key_factor[:, None])
        recalled = read_out(self.shape, source, records, keys, record.log_decay)
        exact = np.clip(record.beta[:, None] * (record.v - recalled), -FP16_MAX, FP16_MAX)
        got = self.given.pop(0)
        largest = np.broadcast_to(np.abs(exact).max(axis=-1, keepdims=True), exact.shape)
        bound = output_bound_of("float16", exact, largest, CANCELLATION)
        assert (np.abs(got - exact) <= bound).all(), (np.abs(got - exact) / bound).max()
        return got


class Twin:
    """A pool on the device and the specification beside it, driven by the same steps."""

    def __init__(self, library: _abi.Library, shape: SsmShape, config: ReplayConfig, act: str, slots: int) -> None:
        torch = torch_module()
        self.rng = np.random.default_rng(7)
        self.shape, self.config, self.act = shape, config, act
        self.dtype = getattr(torch, act)
        self.pool = harness.Pool(shape, config, slots, self.dtype, library)
        self.layers: dict[int, FollowingLayer] = {}
        self.cursors: dict[int, Cursors] = {}
        self.seen: dict[str, dict[int, Any]] = {}
        self.host: dict[str, Any] = {}  # the tensors that `make_rows` made last, as float64
        self.a = -self.rng.uniform(0.2, 16.0, shape.heads).astype(np.float32)
        self.skip = self.rng.standard_normal(shape.heads).astype(np.float32)
        self.gdn = shape.kind is SsmKind.GDN

    def admit(self, slot: int, origin: int = 0) -> None:
        state = self.rng.standard_normal((self.shape.heads, self.shape.head_dim, self.shape.state_dim))
        layer = FollowingLayer(self.shape, self.config, layer=0, exact=not self.gdn)
        layer.checkpoint = state.astype(np.float32).astype(np.float64)
        self.layers[slot], self.cursors[slot] = layer, Cursors(origin=origin)
        self.pool.admit(slot, state, origin)

    def rounded(self, *size: int) -> Any:
        torch = torch_module()
        return torch.from_numpy(self.rng.standard_normal(size)).to(self.dtype)

    def make_rows(self, slots: list[int], counts: list[int], tokens: int) -> dict[str, Any]:
        torch = torch_module()
        s, b = self.shape, len(slots)
        rows = {
            "value": self.rounded(b, tokens, s.heads, s.head_dim),
            "k": self.rounded(b, tokens, s.groups, s.state_dim),
            "q": self.rounded(b, tokens, s.groups, s.state_dim),
        }
        if self.gdn:
            log_decay = -np.exp(self.rng.uniform(-6, 1, (b, tokens, s.heads)))
            rows["log_decay"] = torch.from_numpy(log_decay.astype(np.float32))
            rows["beta"] = torch.from_numpy(self.rng.uniform(0, 1, (b, tokens, s.heads)).astype(np.float32))
        else:
            rows["dt"] = torch.from_numpy(np.exp(self.rng.uniform(-7, -1, (b, tokens, s.heads))).astype(np.float32))
        for tensor in rows.values():
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                tensor[row, count if slot >= 0 else 0 :] = float("nan")
        # Row indices as a strided view: a kernel that assumes stride 1 reads the wrong slots.
        indices = torch.full((b, 3), 123456, dtype=torch.int32)
        indices[:, 0], indices[:, 1] = torch.tensor(slots), torch.tensor(counts)
        self.host = {name: tensor.double().numpy() for name, tensor in rows.items()}
        device = {name: tensor.cuda() for name, tensor in rows.items()}
        on_device = indices.cuda()
        device |= {"slot": on_device[:, 0], "num_tokens": on_device[:, 1]}
        if not self.gdn:
            device |= {"a": torch.from_numpy(self.a).cuda(), "skip": torch.from_numpy(self.skip).cuda()}
        return device

    def step(
        self, slots: list[int], counts: list[int], accepted: list[int], tokens: int, *, states: bool = True
    ) -> None:
        """One update and commit of these rows on both sides, compared; states: what the pool holds as well."""
        torch = torch_module()
        rows = self.make_rows(slots, counts, tokens)
        size = (len(slots), tokens, self.shape.heads, self.shape.head_dim)
        out = torch.full(size, float("nan"), dtype=self.dtype, device="cuda")
        before = {n: t.clone() for n, t in self.pool.tensors.items()} if states else {}
        self.pool.update(rows, out)
        outputs = out.double().cpu().numpy()
        if self.gdn:
            self.look("ring_value")  # the specification follows the device's corrections
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            got = outputs[row]
            live = count if slot >= 0 else 0
            assert (got[live:] == 0).all(), "tokens beyond num_tokens are zero"
            if live:
                self.check_output(got[:live], *self.expected(self.host, row, slot, live))
        if states:
            self.check_untouched(before, slots, counts)
        taken = torch.tensor(accepted, dtype=torch.int32, device="cuda")
        self.pool.commit(rows["slot"], rows["num_tokens"], taken)
        for slot, count, accept in zip(slots, counts, accepted, strict=True):
            if slot >= 0:
                spec_cursors.commit(self.config, self.cursors[slot], count, accept)
        if states:
            self.check_state()

    def expected(self, host: dict[str, Any], row: int, slot: int, count: int) -> tuple[Any, Any]:
        """Outputs [n, H, P] and the sums of the magnitudes of their terms."""
        x = host["value"][row, :count]
        layer = self.layers[slot]
        layer.magnitudes = []
        k, q = host["k"][row, :count], host["q"][row, :count]
        if self.gdn:
            cursors = self.cursors[slot]
            new = [cursors.row(self.config, cursors.h + t) for t in range(count)]
            layer.given = [self.ring("ring_value", slot, r) for r in new]
            inputs = StepInputs(
                k=k, q=q, value=x, log_decay=host["log_decay"][row, :count], beta=host["beta"][row, :count]
            )
            return layer.step(self.cursors[slot], inputs), np.array(layer.magnitudes)
        dt = host["dt"][row, :count]
        log_decay = (dt.astype(np.float32) * self.a).astype(np.float64)
        inputs = StepInputs(k=k, q=q, value=x, log_decay=log_decay, dt=dt)
        out, skip = layer.step(self.cursors[slot], inputs), self.skip[:, None] * x
        return out + skip, np.array(layer.magnitudes) + np.abs(skip)

    def check_output(self, got: Any, expected: Any, magnitude: Any) -> None:
        bound = output_bound_of(self.act, expected, magnitude, STEP_OPERANDS)
        share = np.abs(got - expected) / bound
        worst = np.unravel_index(np.argmax(share), got.shape)
        assert np.isfinite(got).all(), "no poison in an output"
        assert (share <= 1.0).all(), (worst, got[worst], expected[worst], share[worst], int((share > 1.0).sum()))

    def check_untouched(self, before: dict[str, Any], slots: list[int], counts: list[int]) -> None:
        """Slots outside the batch, padding rows and rows without tokens keep every bit."""
        torch = torch_module()
        live = {slot for slot, count in zip(slots, counts, strict=True) if slot >= 0 and count > 0}
        idle = [slot for slot in range(self.pool.slots) if slot not in live]
        index, same = torch.tensor(idle, dtype=torch.int64, device=self.pool.device), []
        for name, tensor in self.pool.tensors.items():
            bits = torch.int16 if tensor.element_size() == 2 else torch.int32
            same.append((tensor[index].view(bits) == before[name][index].view(bits)).all())
        kept = torch.stack(same).tolist()
        assert all(kept), [name for name, ok in zip(self.pool.tensors, kept, strict=True) if not ok]

    def look(self, *names: str) -> None:
        """`seen`: what the pool holds of every admitted slot, as float64 on the host, by tensor and slot.

        names: of the tensors, none for all. One copy: each waits for the device, which other processes may have.
        """
        torch = torch_module()
        slots = list(self.layers)
        index = torch.tensor(slots, device=self.pool.device)
        parts = {name: self.pool.tensors[name][index] for name in names or self.pool.tensors}
        flat = torch.cat([part.double().flatten() for part in parts.values()]).cpu().numpy()
        start = 0
        for name, part in parts.items():
            found = flat[start : start + part.numel()].reshape(part.shape)
            self.seen[name] = dict(zip(slots, found, strict=True))
            start += part.numel()

    def check_state(self) -> None:
        """Checkpoint, cursors and committed records of every admitted slot."""
        self.look()
        for slot, layer in self.layers.items():
            cursors = self.cursors[slot]
            for name, value in (("origin", cursors.origin), ("h", cursors.h), ("position", cursors.position)):
                assert int(self.seen[name][slot]) == value, (name, slot)
            got = self.seen["checkpoint"][slot]
            scale = np.abs(layer.checkpoint).max(axis=(1, 2))
            error = np.abs(got - layer.checkpoint).max(axis=(1, 2))
            assert (error <= CHECKPOINT_BOUND * min(self.flushes(slot), 5) * scale).all(), (slot, (error / scale).max())
            for j in range(cursors.h):
                r = cursors.row(self.config, j)
                record = layer.ring[r]
                assert record is not None
                self.check_record({n: self.ring(n, slot, r) for n in self.pool.tensors if n.startswith("ring")}, record)

    def ring(self, name: str, slot: int, row: int) -> Any:
        return self.seen[name][slot][:, row]

    def check_record(self, got: dict[str, Any], record: Record) -> None:
        assert (got["ring_k"] == record.key).all()
        if not self.gdn:
            assert (got["ring_value"] == record.value).all()
            assert (got["ring_dt"] == record.weight).all()
            return
        assert (got["ring_dt"] == record.log_decay).all()
        assert (np.abs(got["ring_key_factor"] - record.key_factor) <= 3e-7 * record.key_factor).all()
        assert (got["ring_value"] == record.value).all()

    def flushes(self, slot: int) -> int:
        """At least how many folds the checkpoint may have seen."""
        return 1 + self.cursors[slot].position // self.config.window
