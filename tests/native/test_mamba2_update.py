"""The native Mamba-2 update and commit against the float64 specification: outputs, checkpoints, rings and cursors.

Oracle: spec/replay.py with exact states. Outputs may differ by one rounding of the activation type plus the float32
arithmetic; checkpoints by 2e-6 of the head's largest value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.native import harness
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ContractError, EngineMismatchError, UnsupportedError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmShape
from trtllm_replayssm.spec import cursors as spec_cursors
from trtllm_replayssm.spec.cursors import Cursors
from trtllm_replayssm.spec.replay import ReplayLayer, StepInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

CHECKPOINT_BOUND = 2e-6  # of the head's largest value: float32 fold; a TF32 or BF16 operand gives 4e-4 and more
OUTPUT_BOUND = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # one rounding of the output; plus 1e-4 of the row's largest


def torch_module() -> Any:
    import torch

    return torch


@pytest.fixture(scope="module")
def library() -> _abi.Library:
    return _abi.Library(harness.LIBRARY)


class Twin:
    """A pool on the device and the specification beside it, driven by the same steps."""

    def __init__(self, library: _abi.Library, shape: SsmShape, config: ReplayConfig, act: str, slots: int) -> None:
        torch = torch_module()
        self.rng = np.random.default_rng(7)
        self.shape, self.config, self.act = shape, config, act
        self.dtype = getattr(torch, act)
        self.pool = harness.Pool(shape, config, slots, self.dtype, library)
        self.layers: dict[int, ReplayLayer] = {}
        self.cursors: dict[int, Cursors] = {}
        self.a = -self.rng.uniform(0.2, 16.0, shape.heads).astype(np.float32)
        self.skip = self.rng.standard_normal(shape.heads).astype(np.float32)

    def admit(self, slot: int, origin: int = 0) -> None:
        state = self.rng.standard_normal((self.shape.heads, self.shape.head_dim, self.shape.state_dim))
        layer = ReplayLayer(self.shape, self.config, layer=0, exact=True)
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
            "dt": torch.from_numpy(np.exp(self.rng.uniform(-7, -1, (b, tokens, s.heads))).astype(np.float32)),
        }
        for tensor in rows.values():
            for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                tensor[row, count if slot >= 0 else 0 :] = float("nan")
        # Row indices as a strided view: a kernel that assumes stride 1 reads the wrong slots.
        indices = torch.full((b, 3), 123456, dtype=torch.int32)
        indices[:, 0], indices[:, 1] = torch.tensor(slots), torch.tensor(counts)
        device = {name: tensor.cuda() for name, tensor in rows.items()}
        on_device = indices.cuda()
        return {
            **device, "slot": on_device[:, 0], "num_tokens": on_device[:, 1],
            "a": torch.from_numpy(self.a).cuda(), "skip": torch.from_numpy(self.skip).cuda(),
        }  # fmt: skip

    def step(self, slots: list[int], counts: list[int], accepted: list[int], tokens: int) -> None:
        """One update and commit of these rows on both sides, compared."""
        torch = torch_module()
        rows = self.make_rows(slots, counts, tokens)
        size = (len(slots), tokens, self.shape.heads, self.shape.head_dim)
        out = torch.full(size, float("nan"), dtype=self.dtype, device="cuda")
        before = {n: t.clone() for n, t in self.pool.tensors.items()}
        self.pool.update(rows, out)
        torch.cuda.synchronize()
        host = {n: t.double().cpu().numpy() for n, t in rows.items()}
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            got = out[row].double().cpu().numpy()
            live = count if slot >= 0 else 0
            assert (got[live:] == 0).all(), "tokens beyond num_tokens are zero"
            if live:
                self.check_output(got[:live], self.expected(host, row, slot, live))
        self.check_untouched(before, slots, counts)
        taken = torch.tensor(accepted, dtype=torch.int32, device="cuda")
        self.pool.commit(rows["slot"], rows["num_tokens"], taken)
        for slot, count, accept in zip(slots, counts, accepted, strict=True):
            if slot >= 0:
                spec_cursors.commit(self.config, self.cursors[slot], count, accept)
        self.check_state()

    def expected(self, host: dict[str, Any], row: int, slot: int, count: int) -> Any:
        x, dt = host["value"][row, :count], host["dt"][row, :count]
        log_decay = (dt.astype(np.float32) * self.a).astype(np.float64)
        inputs = StepInputs(k=host["k"][row, :count], q=host["q"][row, :count], value=x, log_decay=log_decay, dt=dt)
        return self.layers[slot].step(self.cursors[slot], inputs) + self.skip[:, None] * x

    def check_output(self, got: Any, expected: Any) -> None:
        bound = OUTPUT_BOUND[self.act] * np.abs(expected) + 1e-5 * np.abs(expected).max(axis=-1, keepdims=True) + 1e-5
        worst = np.unravel_index(np.argmax(np.abs(got - expected) / bound), got.shape)
        assert np.isfinite(got).all(), "no poison in an output"
        assert (np.abs(got - expected) <= bound).all(), (worst, got[worst], expected[worst])

    def check_untouched(self, before: dict[str, Any], slots: list[int], counts: list[int]) -> None:
        """Slots outside the batch, padding rows and rows without tokens keep every bit."""
        torch = torch_module()
        live = {slot for slot, count in zip(slots, counts, strict=True) if slot >= 0 and count > 0}
        idle = [slot for slot in range(self.pool.slots) if slot not in live]
        for name, tensor in self.pool.tensors.items():
            bits = torch.int16 if tensor.element_size() == 2 else torch.int32
            assert torch.equal(tensor[idle].view(bits), before[name][idle].view(bits)), name

    def check_state(self) -> None:
        """Checkpoint, cursors and committed records of every admitted slot."""
        for slot, layer in self.layers.items():
            cursors = self.cursors[slot]
            for name, value in (("origin", cursors.origin), ("h", cursors.h), ("position", cursors.position)):
                assert int(self.pool.tensors[name][slot]) == value, (name, slot)
            got = self.pool.tensors["checkpoint"][slot].double().cpu().numpy()
            scale = np.abs(layer.checkpoint).max(axis=(1, 2))
            error = np.abs(got - layer.checkpoint).max(axis=(1, 2))
            assert (error <= CHECKPOINT_BOUND * min(self.flushes(slot), 5) * scale).all(), (slot, (error / scale).max())
            ring = {n: self.pool.tensors[n][slot].double().cpu().numpy() for n in ("ring_value", "ring_k", "ring_dt")}
            for j in range(cursors.h):
                r = cursors.row(self.config, j)
                record = layer.ring[r]
                assert record is not None
                assert (ring["ring_value"][:, r] == record.value).all()
                assert (ring["ring_k"][:, r] == record.key).all()
                assert (ring["ring_dt"][:, r] == record.weight).all()

    def flushes(self, slot: int) -> int:
        """At least how many folds the checkpoint may have seen."""
        return 1 + self.cursors[slot].position // self.config.window


def base_shape(head_dim: int = 64) -> SsmShape:
    return harness.mamba2_shape(heads=8, groups=2, head_dim=head_dim, state_dim=128)


@pytest.mark.parametrize("padding", [0, 60], ids=["direct", "streamed"])
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_plain_decoding_matches_the_specification_through_three_windows(
    library: _abi.Library, head_dim: int, act: str, padding: int
) -> None:
    twin = Twin(library, base_shape(head_dim), ReplayConfig(window=16), act, slots=5)
    for slot, origin in ((0, 0), (2, 16), (4, 9)):
        twin.admit(slot, origin)
    for _ in range(50):
        idle = [-1] * padding
        twin.step([4, -1, 0, 2, *idle], [1] * (4 + padding), [1] * (4 + padding), tokens=1)


@pytest.mark.parametrize("padding", [0, 60], ids=["direct", "streamed"])
@pytest.mark.parametrize("window", [1, 2, 3, 8, 16, 40, 64])
@pytest.mark.parametrize("tokens", [1, 2, 4, 6, 8, 9, 16])
def test_random_steps_match_the_specification(library: _abi.Library, window: int, tokens: int, padding: int) -> None:
    """Padding rows swell the batch, so that the launch choice takes the kernel for large batches."""
    if tokens > window:
        pytest.skip("T_max <= L")
    twin = Twin(library, base_shape(), ReplayConfig(window=window, max_step_tokens=tokens), "bfloat16", slots=6)
    for slot in (0, 1, 3, 5):
        twin.admit(slot, origin=(slot * 7) % twin.config.ring_rows)
    for step in range(24):
        slots = [5, 0, -1, 3, 1]
        counts = [int(twin.rng.integers(0, tokens + 1)) for _ in slots]
        counts[step % 5] = tokens
        accepted = [int(twin.rng.integers(0, count + 1)) for count in counts]
        if step % 4 == 0:
            accepted = counts
        idle = [-1] * padding
        twin.step(slots + idle, counts + [tokens] * padding, accepted + idle, tokens)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("accept_all", [True, False])
def test_the_step_at_the_window_border(library: _abi.Library, offset: int, accept_all: bool) -> None:
    """h + T = L - 1, L and L + 1, then a plain step and an idle one."""
    window, tokens = 16, 6
    twin = Twin(library, base_shape(), ReplayConfig(window=window, max_step_tokens=tokens), "bfloat16", slots=2)
    twin.admit(1, origin=20)
    for _ in range(window - tokens + offset):
        twin.step([1], [1], [1], tokens)
    twin.step([1], [tokens], [tokens if accept_all else 1], tokens)
    twin.step([1], [0], [0], tokens)
    twin.step([1], [1], [1], tokens)


@pytest.mark.parametrize("rows", [1, 40])
def test_wide_and_narrow_items_and_real_shapes(library: _abi.Library, rows: int) -> None:
    """The production head counts at both launch choices; accepted out of range is clamped."""
    shape = harness.mamba2_shape(heads=128, groups=8, head_dim=64, state_dim=128)
    twin = Twin(library, shape, ReplayConfig(window=3, max_step_tokens=2), "bfloat16", slots=rows + 1)
    for slot in range(1, rows + 1):
        twin.admit(slot, origin=slot % 5)
    for _ in range(4):
        twin.step(list(range(rows, 0, -1)), [2] * rows, [9 if row % 2 else 2 for row in range(rows)], tokens=2)


def test_all_decay_gone_stays_finite(library: _abi.Library) -> None:
    twin = Twin(library, base_shape(), ReplayConfig(window=4, max_step_tokens=4), "bfloat16", slots=1)
    twin.a[:] = -1e30
    twin.admit(0)
    for _ in range(3):
        twin.step([0], [4], [3], tokens=4)


def test_hundred_identical_flushes_give_one_hash(library: _abi.Library) -> None:
    torch = torch_module()
    twin = Twin(library, base_shape(), ReplayConfig(window=8, max_step_tokens=4), "bfloat16", slots=99)
    for slot in range(99):
        twin.admit(slot)
    slots = list(range(99))
    for _ in range(2):
        twin.step(slots, [4] * 99, [4] * 99, tokens=4)
    saved = {n: t.clone() for n, t in twin.pool.tensors.items()}
    rows = twin.make_rows(slots, [4] * 99, 4)
    hashes = set()
    for _ in range(100):
        for name, tensor in saved.items():
            twin.pool.tensors[name].copy_(tensor)
        out = torch.full((99, 4, 8, 64), float("nan"), dtype=torch.bfloat16, device="cuda")
        twin.pool.update(rows, out)
        state = twin.pool.tensors["checkpoint"].view(torch.int32).long()
        weights = torch.arange(1, state.numel() + 1, device="cuda").view_as(state)
        hashes.add((int((state * weights).sum()), int((out.view(torch.int16).long() * weights.view(-1)[: out.numel()]
                                                       .view_as(out)).sum())))  # fmt: skip
    assert len(hashes) == 1


def test_graph_replay_follows_the_cursors(library: _abi.Library) -> None:
    """Update and commit captured once, replayed across two flushes with fresh inputs each time."""
    torch = torch_module()
    eager = Twin(library, base_shape(), ReplayConfig(window=4), "bfloat16", slots=2)
    eager.admit(0)
    replayed = Twin(library, base_shape(), ReplayConfig(window=4), "bfloat16", slots=2)
    replayed.admit(0)
    static = replayed.make_rows([0], [1], 1)
    out = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16, device="cuda")
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for flags in (0, _abi.UPDATE_PROGRAMMATIC_LAUNCH):
            replayed.pool.update(static, out, flags)
            replayed.pool.commit(static["slot"], static["num_tokens"], one)
    for _ in range(6):
        rows = eager.make_rows([0], [1], 1)
        for name in ("value", "k", "q", "dt"):
            static[name].copy_(rows[name])
        graph.replay()
        expected = torch.zeros_like(out)
        for _ in range(2):
            eager.pool.update(rows, expected)
            eager.pool.commit(rows["slot"], rows["num_tokens"], one)
        torch.cuda.synchronize()
        assert (out == expected).all()
    for name, tensor in eager.pool.tensors.items():
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(replayed.pool.tensors[name])), name


def test_pools_beyond_two_to_the_32_bytes_and_elements(library: _abi.Library) -> None:
    """The last slot of a pool of more than 2^32 elements; slot 0 keeps its bits."""
    shape = harness.mamba2_shape(heads=128, groups=8, head_dim=64, state_dim=128)
    slots = 2**32 // shape.state_elems + 2
    twin = Twin(library, shape, ReplayConfig(window=2, max_step_tokens=2), "bfloat16", slots=1)
    del twin.pool
    twin.pool = harness.Pool(shape, twin.config, slots, twin.dtype, library)
    twin.admit(0)
    twin.admit(slots - 1)
    first = twin.pool.tensors["checkpoint"][0].clone()
    rows_step = [slots - 1]
    twin.check_untouched = lambda *_: None  # type: ignore[method-assign]
    for _ in range(3):
        twin.step(rows_step, [2], [2], tokens=2)
    assert (twin.pool.tensors["checkpoint"][0] == first).all()


def test_wrong_calls_are_named_before_any_launch(library: _abi.Library) -> None:
    torch = torch_module()
    twin = Twin(library, base_shape(), ReplayConfig(window=16, max_step_tokens=2), "bfloat16", slots=2)
    rows = twin.make_rows([0], [2], 2)
    out = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ContractError, match="q: expected"):
        twin.pool.update({**rows, "q": rows["q"][:, :, :1]}, out)
    with pytest.raises(ContractError, match="dt: expected float32"):
        twin.pool.update({**rows, "dt": rows["dt"].double().half()}, out)
    with pytest.raises(ContractError, match="C >= window"):
        twin.pool.update(twin.make_rows([0], [3], 3), torch.zeros(1, 3, 8, 64, dtype=torch.bfloat16, device="cuda"))
    with pytest.raises(UnsupportedError, match="built are"):
        narrow = Twin(library, harness.mamba2_shape(8, 2, 16, 128), twin.config, "bfloat16", slots=1)
        narrow.pool.update(narrow.make_rows([0], [2], 2), torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16, device="cuda"))
    args = _abi.UpdateArgs()
    record = _abi.ErrorRecord()
    assert library._handle.rssm_update(_abi.ctypes.byref(args), None, None, None, _abi.ctypes.byref(record)) == 4
    assert b"struct_size" in record.message and EngineMismatchError


def test_empty_batches_do_nothing(library: _abi.Library) -> None:
    torch = torch_module()
    twin = Twin(library, base_shape(), ReplayConfig(window=4), "bfloat16", slots=1)
    rows = twin.make_rows([], [], 1)
    twin.pool.update(rows, torch.zeros(0, 1, 8, 64, dtype=torch.bfloat16, device="cuda"))
    twin.pool.commit(rows["slot"], rows["num_tokens"], rows["num_tokens"])
