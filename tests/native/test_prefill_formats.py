"""The prompt scan over low-precision pools.

Oracles: the float32 reference operations for the state before it is rounded (two orders of the same float32 sums; a
correction that is not re-derived is off by 1e-3 and more); the reference encoder, bit for bit, for what is stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.philox import state_words

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from tests.native.stores import store_views
    from trtllm_replayssm.ops import _abi
    from trtllm_replayssm.ops.layer_state import CursorTensors, ReplayLayerState
    from trtllm_replayssm.ops.reference import gdn, mamba2, prefill
    from trtllm_replayssm.ops.state_store import StateStore

SLOTS, LAYER, HEAD_OFFSET, TOKENS = 5, 37, 3, 70
ORDER_NOISE = 5e-6  # of the head's largest value
FORMATS = [
    (StateFormat.FLOAT16, None),
    (StateFormat.FP8, None),
    (StateFormat.FLOAT32, StateFormat.FP8),
    (StateFormat.FLOAT32, StateFormat.NVFP4),
    (StateFormat.FLOAT16, StateFormat.NVFP4),
    (StateFormat.FP8, StateFormat.FLOAT16),
]
SIZES = [(SsmKind.MAMBA2, 64, 128), (SsmKind.MAMBA2, 80, 128), (SsmKind.GDN, 128, 128), (SsmKind.GDN, 64, 256)]


class Layer:
    """Five slots of a pool with random states, records and cursors, and a prompt for three of them."""

    def __init__(
        self, library: _abi.Library, kind: SsmKind, head_dim: int, state_dim: int, config: ReplayConfig
    ) -> None:
        self.native, self.config, self.gdn = library, config, kind is SsmKind.GDN
        self.shape = ssm_shape(kind, heads=4, groups=2, head_dim=head_dim, state_dim=state_dim)
        self.random = torch.Generator("cuda").manual_seed(head_dim + state_dim)
        s, device = self.shape, torch.device("cuda")
        self.state = ReplayLayerState.allocate(s, config, LAYER, SLOTS, torch.bfloat16, device)
        states = self.normal(SLOTS, s.heads, s.head_dim, s.state_dim)
        for copy in (self.state.checkpoint, self.state.read_copy):
            if copy is not None:
                copy.store(list(range(SLOTS)), states, Rounding.NEAREST, [None] * SLOTS)
        for ring in self.state.ring_tensors():
            ring.copy_(self.normal(*ring.shape))
        self.state.ring_decay.copy_((-1 if self.gdn else 1) * self.uniform(*self.state.ring_decay.shape))
        if self.state.ring_key_factor is not None:
            self.state.ring_key_factor.copy_(gdn.key_factor(self.state.ring_key))
        if self.state.ring_beta is not None:
            self.state.ring_beta.copy_(self.uniform(*self.state.ring_beta.shape))
        self.cursors = CursorTensors.allocate(SLOTS, device)
        self.cursors.origin.copy_(torch.tensor([0, 3, 11, 16, 5]))
        self.cursors.h.copy_(torch.tensor([0, 7, 16, 16, 2]))
        self.cursors.position.copy_(torch.tensor([0, 90, 123456, 31, 2]))
        self.cursors.seed.copy_(torch.tensor([1, -5, 2**62 + 9, 7, 1 << 40]))
        self.a = -16 * self.uniform(s.heads)
        self.prompt = self.make_prompt(4)

    def normal(self, *size: int) -> Any:
        return torch.randn(*size, generator=self.random, device="cuda")

    def uniform(self, *size: int) -> Any:
        return torch.rand(*size, generator=self.random, device="cuda")

    def make_prompt(self, rows: int) -> dict[str, Any]:
        s, shape = self.shape, (rows, TOKENS)
        prompt = {
            "value": self.normal(*shape, s.heads, s.head_dim).bfloat16(),
            "k": self.normal(*shape, s.groups, s.state_dim).bfloat16(),
            "q": self.normal(*shape, s.groups, s.state_dim).bfloat16(),
        }
        if self.gdn:
            return prompt | {"log_decay": -self.uniform(*shape, s.heads), "beta": self.uniform(*shape, s.heads)}
        return prompt | {"dt": 0.2 * self.uniform(*shape, s.heads), "a": self.a}

    def run(self, slots: list[int], counts: list[int], flags: list[int], carry: Any, **changes: _abi.Tensor) -> Any:
        """One launch; the outputs. carry [4, H, P, N] or None; row i has entry i."""
        out = torch.full_like(self.prompt["value"], float("nan"))
        rows = {"slot": slots, "num_tokens": counts, "row_flags": flags, "carry_index": [0, 1, 2, 3]}
        tensors = {name: torch.tensor(values, dtype=torch.int32, device="cuda") for name, values in rows.items()}
        ring = {"ring_value": "ring_value", "ring_key": "ring_k", "ring_decay": "ring_dt", "ring_beta": "ring_beta",
                "ring_key_factor": "ring_key_factor", "ring_v": "ring_v"}  # fmt: skip
        tensors |= {
            name: getattr(self.state, own) for own, name in ring.items() if getattr(self.state, own) is not None
        }
        tensors |= {name: getattr(self.cursors, name) for name in ("origin", "h", "position", "seed")}
        tensors |= {"out": out} | ({} if carry is None else {"carry": carry})
        views = {name: harness.view(t) for name, t in (self.prompt | tensors).items()}
        views |= store_views("checkpoint", self.state.checkpoint)
        if self.state.read_copy is not None:
            views |= store_views("read", self.state.read_copy)
        args = _abi.PrefillArgs(
            kind=int(_abi.Kind.GDN if self.gdn else _abi.Kind.MAMBA2), window=self.config.window, layer=LAYER,
            head_offset=HEAD_OFFSET, **(views | changes),
        )  # fmt: skip
        workspace = torch.full((self.native.prefill_workspace(args),), 255, dtype=torch.uint8, device="cuda")
        self.native.prefill(args, workspace.data_ptr(), workspace.numel(), torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        return out

    def expected(self, row: int, slot: int, count: int, fresh: bool) -> Any:
        """The state after the prompt [H, P, N] by the reference operations, float32."""
        index = torch.tensor([slot], device="cuda")
        p = {name: t if name == "a" else t[row, :count] for name, t in self.prompt.items()}
        if self.gdn:
            before = gdn.gdn_fold(self.state, self.cursors, index)[0]
            before = torch.zeros_like(before) if fresh else before
            return prefill.gdn_scan(self.shape, before, p["q"], p["k"], p["value"], p["log_decay"], p["beta"])[1]
        before = mamba2.mamba2_fold(self.state, self.cursors, index, self.a)[0]
        before = torch.zeros_like(before) if fresh else before
        return prefill.mamba2_scan(self.shape, before, p["value"], p["k"], p["q"], p["dt"], p["a"])[1]

    def bytes_of(self, slot: int) -> list[Any]:
        """Every stored byte of a slot's copies."""
        return [t[slot].contiguous().view(torch.uint8).cpu().clone() for t in copies(self.state)]


def copies(state: ReplayLayerState) -> list[Any]:
    read = [] if state.read_copy is None else state.read_copy.tensors()
    return [*state.checkpoint.tensors(), *read]


def encoded(layer: Layer, slot: int, count: int, state: Any) -> list[Any]:
    """The bytes the reference encoder stores for a float32 state after `count` more tokens."""
    shape, config = layer.shape, layer.config
    words: np.ndarray[Any, Any] | None = None
    if config.recurrence is not StateFormat.FLOAT32:
        seed, position = int(layer.cursors.seed[slot]), int(layer.cursors.position[slot]) + count
        elements = shape.head_dim * shape.state_dim
        words = state_words(seed, LAYER, shape.heads + HEAD_OFFSET, elements, position)[HEAD_OFFSET:]
    stored = []
    for fmt, rounding in ((config.recurrence, Rounding.STOCHASTIC), (config.read, Rounding.NEAREST)):
        if fmt is not None:
            store = StateStore.allocate(fmt, shape, 1, torch.device("cpu"))
            store.store([0], state[None].cpu(), rounding, [words])
            stored += [t[0].contiguous().view(torch.uint8) for t in store.tensors()]
    return stored


@pytest.mark.parametrize(("recurrence", "read"), FORMATS)
@pytest.mark.parametrize(("kind", "head_dim", "state_dim"), SIZES)
def test_stored_copies_are_the_reference_encoding_of_the_scanned_state(
    library: _abi.Library, kind: SsmKind, head_dim: int, state_dim: int, recurrence: StateFormat, read: StateFormat
) -> None:
    config = ReplayConfig(window=16, recurrence=recurrence, read=read)
    layer = Layer(library, kind, head_dim, state_dim, config)
    slots, counts, fresh = [2, -1, 4, 1], [TOKENS, 9, 0, 33], int(_abi.PrefillFlag.FROM_ZERO)
    before = {slot: layer.bytes_of(slot) for slot in range(SLOTS)}
    carry = torch.full((4, 4, head_dim, state_dim), float("nan"), device="cuda")
    to_carry = int(_abi.PrefillFlag.TO_CARRY)
    first = layer.run(slots, counts, [to_carry, to_carry, to_carry, to_carry | fresh], carry)
    assert all(
        torch.equal(a, b) for slot in range(SLOTS) for a, b in zip(before[slot], layer.bytes_of(slot), strict=True)
    )
    for row in (0, 3):
        want = layer.expected(row, slots[row], counts[row], fresh=row == 3)
        scale = want.abs().amax(dim=(1, 2), keepdim=True)
        assert ((carry[row] - want).abs() <= ORDER_NOISE * scale).all(), ((carry[row] - want).abs() / scale).max()
    kept = carry.clone()
    second = layer.run(slots, counts, [0, 0, 0, fresh], carry)
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))
    assert torch.equal(carry.view(torch.int32), kept.view(torch.int32)), "rows without a carry leave it alone"
    for row, slot in enumerate(slots):
        if counts[row] and slot >= 0:
            want = encoded(layer, slot, counts[row], kept[row])
            assert all(torch.equal(a, b) for a, b in zip(layer.bytes_of(slot), want, strict=True)), slot
            del before[slot]
    for slot, old in before.items():
        assert all(torch.equal(a, b) for a, b in zip(layer.bytes_of(slot), old, strict=True)), (
            "idle slots keep every bit"
        )


def test_a_carried_chunk_ends_in_the_copies(library: _abi.Library) -> None:
    """The second chunk starts from the carry, whatever the pool holds, and rounds once."""
    config = ReplayConfig(window=16, recurrence=StateFormat.FLOAT16, read=StateFormat.FP8)
    layer = Layer(library, SsmKind.GDN, 128, 128, config)
    carry = torch.full((4, 4, 128, 128), float("nan"), device="cuda")
    from_carry, to_carry = int(_abi.PrefillFlag.FROM_CARRY), int(_abi.PrefillFlag.TO_CARRY)
    layer.run([0, 1, -1, -1], [TOKENS, 20, 0, 0], [to_carry] * 4, carry)
    middle = carry.clone()
    layer.run([0, 1, -1, -1], [5, 64, 0, 0], [from_carry | to_carry] * 4, carry)
    end = carry.clone()
    assert not torch.equal(end[:2], middle[:2])
    carry.copy_(middle)
    layer.run([0, 1, -1, -1], [5, 64, 0, 0], [from_carry] * 4, carry)
    for slot, count in ((0, 5), (1, 64)):
        want = encoded(layer, slot, count, end[slot])
        assert all(torch.equal(a, b) for a, b in zip(layer.bytes_of(slot), want, strict=True)), slot


def test_stochastic_rounding_needs_seeds(library: _abi.Library) -> None:
    layer = Layer(library, SsmKind.MAMBA2, 64, 128, ReplayConfig(window=16, recurrence=StateFormat.FLOAT16))
    with pytest.raises(ContractError, match="seed"):
        layer.run([0, -1, -1, -1], [3, 0, 0, 0], [0] * 4, torch.zeros(4, 4, 64, 128, device="cuda"), seed=_abi.Tensor())
