"""Whole states out of and into a pool.

Oracles: spec/replay.py in float64 for exports (a float32 fold: 2e-6 of the head's largest value), the reference encoder
for imports, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec.cursors import Cursors
from trtllm_replayssm.spec.philox import state_words
from trtllm_replayssm.spec.replay import Record, ReplayLayer
from trtllm_replayssm.spec.ssm import l2_norm_factor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from tests.native.stores import poisoned_store, same_bits, store_views
    from trtllm_replayssm.ops import _abi

EXPORT_BOUND = 2e-6  # of the head's largest value; a TF32 or BF16 operand gives 4e-4 and more
SHAPES = [(4, 2, 64, 128), (6, 3, 80, 64), (2, 1, 24, 96), (2, 2, 128, 256), (3, 3, 5, 4)]


class RecordedPool:
    """Slots with random checkpoints and rings (dead records NaN), and the specification's layers beside them."""

    SLOTS, MAX_TOKENS = 6, 4

    def __init__(
        self, shape: SsmShape, window: int, act: str, *, fmt: StateFormat = StateFormat.FLOAT32, rederives: bool = False
    ) -> None:
        self.rng = np.random.default_rng(window + shape.state_dim)
        self.shape, self.dtype, self.rederives = shape, getattr(torch, act), rederives
        read = StateFormat.FLOAT16 if rederives else None
        self.config = ReplayConfig(window=window, max_step_tokens=min(window, self.MAX_TOKENS), read=read)
        self.store = poisoned_store(fmt, shape, self.SLOTS)
        self.a = -self.rng.uniform(0.2, 16.0, shape.heads).astype(np.float32)
        gdn, rows = shape.kind is SsmKind.GDN, self.config.ring_rows

        def ring(*sizes: int, dtype: Any = torch.float32) -> Any:
            return torch.full((self.SLOTS, *sizes), float("nan"), dtype=dtype)

        self.ring = {
            "ring_value": ring(shape.heads, rows, shape.head_dim, dtype=torch.float16 if gdn else self.dtype),
            "ring_k": ring(shape.groups, rows, shape.state_dim, dtype=self.dtype),
            "ring_dt": ring(shape.heads, rows),
        }
        if gdn:
            self.ring["ring_key_factor"] = ring(shape.groups, rows)
        if rederives:
            self.ring["ring_v"] = ring(shape.heads, rows, shape.head_dim, dtype=self.dtype)
            self.ring["ring_beta"] = ring(shape.heads, rows)
        self.layers: dict[int, ReplayLayer] = {}
        self.cursors: dict[int, Cursors] = {}

    def admit(self, slot: int, origin: int, h: int) -> None:
        s = self.shape
        state = torch.from_numpy(self.rng.standard_normal((1, s.heads, s.head_dim, s.state_dim)).astype(np.float32))
        words = self.rng.integers(0, 2**32, (s.heads, s.head_dim * s.state_dim), dtype=np.uint32)
        self.store.store([slot], state.to(self.store.data.device), Rounding.STOCHASTIC, [words])
        layer = ReplayLayer(s, self.config, layer=0, exact=True)
        layer.checkpoint = self.store.load(torch.tensor([slot], device="cuda"))[0].double().cpu().numpy()
        cursors = Cursors(origin=origin, h=h)
        for j in range(h):
            row = cursors.row(self.config, j)
            layer.ring[row] = self.record(slot, row)
        self.layers[slot], self.cursors[slot] = layer, cursors

    def record(self, slot: int, row: int) -> Record:
        """A random record in the ring, as the specification sees it."""
        s, rng = self.shape, self.rng
        self.put("ring_k", slot, row, rng.standard_normal((s.groups, s.state_dim)))
        self.put("ring_value", slot, row, rng.standard_normal((s.heads, s.head_dim)))
        if s.kind is SsmKind.MAMBA2:
            self.put("ring_dt", slot, row, np.exp(rng.uniform(-7, -1, s.heads)))
            dt = self.get("ring_dt", slot, row)
            decay = (dt.astype(np.float32) * self.a).astype(np.float64)
            key, value = self.get("ring_k", slot, row), self.get("ring_value", slot, row)
            return Record(key, np.ones(s.groups), decay, value, weight=dt)
        self.put("ring_dt", slot, row, -np.exp(rng.uniform(-6, 1, s.heads)))
        self.put("ring_key_factor", slot, row, l2_norm_factor(self.get("ring_k", slot, row)))
        v = beta = None
        if self.rederives:
            self.put("ring_v", slot, row, rng.standard_normal((s.heads, s.head_dim)))
            self.put("ring_beta", slot, row, rng.uniform(0, 1, s.heads))
            v, beta = self.get("ring_v", slot, row), self.get("ring_beta", slot, row)
        key, factor = self.get("ring_k", slot, row), self.get("ring_key_factor", slot, row)
        return Record(
            key, factor, self.get("ring_dt", slot, row), self.get("ring_value", slot, row), v=v, beta=beta
        )  # fmt: skip

    def put(self, name: str, slot: int, row: int, values: Any) -> None:
        tensor = self.ring[name]
        tensor[slot, :, row] = torch.from_numpy(np.asarray(values)).to(tensor.dtype)

    def get(self, name: str, slot: int, row: int) -> Any:
        return self.ring[name][slot, :, row].double().numpy()

    def export(self, library: _abi.Library, slots: list[int]) -> Any:
        """[E, H, P, N] float64 on the host; the pool must keep its bits."""
        s, view = self.shape, harness.view
        cursors = {
            name: torch.tensor([getattr(self.cursors.get(i, Cursors()), name) for i in range(self.SLOTS)]).int().cuda()
            for name in ("origin", "h")
        }
        ring = {name: tensor.cuda() for name, tensor in self.ring.items()}
        state = torch.full((len(slots), s.heads, s.head_dim, s.state_dim), float("nan"), device="cuda")
        chosen, a = torch.tensor(slots, dtype=torch.int32, device="cuda"), torch.from_numpy(self.a).cuda()
        kind = _abi.Kind.GDN if s.kind is SsmKind.GDN else _abi.Kind.MAMBA2
        args = _abi.StateExportArgs(
            kind=int(kind), window=self.config.window, slot=view(chosen), a=view(a), state=view(state),
            **{name: view(tensor) for name, tensor in (cursors | ring).items()},
            **store_views("checkpoint", self.store),
        )  # fmt: skip
        before = [t.clone() for t in self.store.tensors()]
        library.state_export(args, harness.Pool._stream())
        torch.cuda.synchronize()
        for tensor, old in zip(self.store.tensors(), before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
        for name, tensor in ring.items():
            bits = torch.int16 if tensor.element_size() == 2 else torch.int32
            assert torch.equal(tensor.cpu().view(bits), self.ring[name].view(bits)), name
        return state.double().cpu().numpy()

    def check(self, library: _abi.Library, slots: list[int]) -> None:
        got = self.export(library, slots)
        for entry, slot in enumerate(slots):
            if slot < 0:
                assert (got[entry] == 0).all()
                continue
            expected = self.layers[slot].fold(self.cursors[slot])
            scale = np.abs(expected).max(axis=(1, 2), keepdims=True)
            assert np.isfinite(got[entry]).all()
            error = (np.abs(got[entry] - expected) / scale).max()
            assert error <= EXPORT_BOUND, (slot, error)


def shape_of(kind: SsmKind, sizes: tuple[int, int, int, int]) -> SsmShape:
    return ssm_shape(kind, *sizes)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [1, 16, 64])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [SsmKind.MAMBA2, SsmKind.GDN], ids=lambda kind: kind.value)
def test_an_export_is_the_checkpoint_with_its_records(
    library: _abi.Library, kind: SsmKind, sizes: tuple[int, int, int, int], window: int, act: str
) -> None:
    pool = RecordedPool(shape_of(kind, sizes), window, act)
    for slot, h in ((0, window), (2, 0), (5, max(window - 3, 1))):
        pool.admit(slot, origin=(7 * slot + 1) % pool.config.ring_rows, h=h)
    pool.check(library, [5, 0, -1, 2])


@pytest.mark.parametrize("fmt", [StateFormat.FLOAT16, StateFormat.FP8], ids=lambda fmt: fmt.value)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_low_precision_checkpoints_are_read_exactly(
    library: _abi.Library, fmt: StateFormat, sizes: tuple[int, int, int, int]
) -> None:
    pool = RecordedPool(shape_of(SsmKind.MAMBA2, sizes), 16, "bfloat16", fmt=fmt)
    pool.admit(3, origin=18, h=9)
    pool.admit(1, origin=0, h=0)
    pool.check(library, [1, 3])
    stored = pool.store.load(torch.tensor([1], device="cuda"))[0].double().cpu().numpy()
    assert (pool.export(library, [1])[0] == stored).all()


@pytest.mark.parametrize("window", [2, 16, 64])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_corrections_are_derived_anew_where_flushes_do(
    library: _abi.Library, sizes: tuple[int, int, int, int], window: int
) -> None:
    """The cached corrections are random here: an export that folded them would be far off."""
    pool = RecordedPool(shape_of(SsmKind.GDN, sizes), window, "bfloat16", rederives=True)
    pool.admit(4, origin=1, h=window)
    pool.admit(0, origin=0, h=1)
    pool.check(library, [0, 4])


def test_all_decay_gone_stays_finite(library: _abi.Library) -> None:
    pool = RecordedPool(shape_of(SsmKind.MAMBA2, SHAPES[0]), 8, "bfloat16")
    pool.a[:] = -1e30
    pool.admit(0, origin=0, h=8)
    pool.check(library, [0])


@pytest.mark.parametrize("read", [None, "float16", "fp8", "nvfp4"])
@pytest.mark.parametrize("recurrence", ["float32", "float16", "fp8"])
@pytest.mark.parametrize("sizes", SHAPES[:4], ids=str)
def test_an_import_has_the_bits_of_the_reference_encoder(
    library: _abi.Library, sizes: tuple[int, int, int, int], recurrence: str, read: str | None
) -> None:
    shape, slots, layer, head_offset = shape_of(SsmKind.MAMBA2, sizes), [3, -1, 0], 41, 5
    rng = np.random.default_rng(3)
    exponents = rng.uniform(-30, 6, (len(slots), *sizes[:1], *sizes[2:]))
    states = (rng.choice([-1.0, 1.0], exponents.shape) * np.exp2(exponents)).astype(np.float32)
    states[0, 0, 0] = 0.0
    states[2, 0] = 0.0
    seeds, positions = [2**63 - 1, 1, -5], [1000, 2, 77]
    formats = [StateFormat(recurrence), *([StateFormat(read)] if read else [])]
    stores = [poisoned_store(fmt, shape, slots=4) for fmt in formats]
    expected = [poisoned_store(fmt, shape, slots=4) for fmt in formats]
    on_device = torch.from_numpy(states).cuda()
    for entry, slot in enumerate(slots):
        if slot >= 0:
            elems = shape.head_dim * shape.state_dim
            words = state_words(seeds[entry], layer, head_offset + shape.heads, elems, positions[entry])
            expected[0].store([slot], on_device[entry : entry + 1], Rounding.STOCHASTIC, [words[head_offset:]])
            for store in expected[1:]:
                store.store([slot], on_device[entry : entry + 1], Rounding.NEAREST, [None])
    vectors = {
        "slot": torch.tensor(slots, dtype=torch.int32).cuda(), "seed": torch.tensor(seeds).cuda(),
        "position": torch.tensor(positions, dtype=torch.int32).cuda(), "state": on_device,
    }  # fmt: skip
    args = _abi.StateImportArgs(
        layer=layer, head_offset=head_offset, **{name: harness.view(t) for name, t in vectors.items()},
        **store_views("checkpoint", stores[0]), **(store_views("read", stores[1]) if read else {}),
    )  # fmt: skip
    library.state_import(args, harness.Pool._stream())
    torch.cuda.synchronize()
    for store, want in zip(stores, expected, strict=True):
        assert same_bits(store, want), store.format
