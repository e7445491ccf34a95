"""Checkpoint stores in every format: the specification's encoding bit for bit, slots apart, bytes as planned (D05)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import CPU, as_bytes
from trtllm_replayssm.dtypes import E2M1_VALUES, FP8_BLOCK, Rounding, StateFormat
from trtllm_replayssm.ops.state_store import StateStore
from trtllm_replayssm.shapes import SsmKind, SsmShape
from trtllm_replayssm.spec.formats import encode
from trtllm_replayssm.spec.philox import state_words

FORMATS = list(StateFormat)
SHAPE = ssm_shape(SsmKind.MAMBA2, heads=3, groups=1, head_dim=5, state_dim=160)  # an odd FP8 block and ten NVFP4 ones


def words_for(shape: SsmShape, seed: int = 3) -> np.ndarray:
    return state_words(seed, 2, shape.heads, shape.head_dim * shape.state_dim, 17)


def awkward_states(shape: SsmShape, count: int) -> torch.Tensor:
    """Normal values over 12 decades, zeros of both signs, zero blocks, and the largest and smallest floats."""
    g = torch.Generator().manual_seed(0)
    size = (count, shape.heads, shape.head_dim, shape.state_dim)
    states = torch.randn(size, generator=g) * 10.0 ** torch.randint(-6, 6, size, generator=g)
    states[0, 0] = 0.0
    states[0, 1, 1, :16] = -0.0
    states[0, 1, 2, 3] = 1e-42
    states[0, 1, 3, 5] = 65504.0
    states[0, 2, 4, 0] = 3.4e38
    return states


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", list(Rounding))
def test_a_stored_state_reads_back_as_the_specification_says(fmt: StateFormat, rounding: Rounding) -> None:
    states = awkward_states(SHAPE, 2)
    words = [words_for(SHAPE, seed) for seed in (3, 4)]
    store = StateStore.allocate(fmt, SHAPE, 4, CPU)
    store.store([3, 1], states, rounding, words)  # type: ignore[arg-type]
    got = store.load(torch.tensor([1, 3]))
    for row, state, word in zip((1, 0), states, words, strict=True):
        want = encode(state.numpy(), fmt, rounding, word).decode()
        assert np.array_equal(got[row].numpy(), want)
        assert np.array_equal(np.signbit(got[row].numpy()), np.signbit(want))


@pytest.mark.parametrize("fmt", FORMATS)
def test_other_slots_keep_their_bytes(fmt: StateFormat) -> None:
    store = StateStore.allocate(fmt, SHAPE, 4, CPU)
    store.store([0, 1, 2, 3], awkward_states(SHAPE, 4), Rounding.NEAREST, [None] * 4)
    before = [as_bytes(t[slot]) for t in store.tensors() for slot in (0, 1, 3)]
    store.store([2], torch.ones(1, 3, 5, 160), Rounding.NEAREST, [None])
    assert (store.load(torch.tensor([2])) == 1).all()
    store.clear(2)
    assert (store.load(torch.tensor([2])) == 0).all()
    after = [as_bytes(t[slot]) for t in store.tensors() for slot in (0, 1, 3)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cleared_slot_is_a_fresh_one_whatever_it_held(fmt: StateFormat) -> None:
    """A01, B01: NaN states and scales included."""
    fresh, used = StateStore.allocate(fmt, SHAPE, 2, CPU), StateStore.allocate(fmt, SHAPE, 2, CPU)
    used.store([1], torch.full((1, 3, 5, 160), float("nan")), Rounding.NEAREST, [None])
    for tensor in used.tensors():
        tensor.view(torch.uint8)[1] = 0x7F
    used.clear(1)
    for a, b in zip(fresh.tensors(), used.tensors(), strict=True):
        assert torch.equal(as_bytes(a[1]), as_bytes(b[1]))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("state_dim", [64, 96, 128, 256])
def test_a_slot_takes_the_planned_bytes(fmt: StateFormat, state_dim: int) -> None:
    shape = ssm_shape(SsmKind.GDN, heads=3, groups=1, head_dim=7, state_dim=state_dim)
    store = StateStore.allocate(fmt, shape, 5, CPU)
    taken = sum(t.numel() * t.element_size() for t in store.tensors())
    assert taken == 5 * shape.heads * fmt.bytes_per_head(shape.head_dim, shape.state_dim)


def test_every_e2m1_code_survives_packing() -> None:
    """All sixteen codes at both nibbles; amax 6 * 448 makes both scales 1 * 448 exactly."""
    shape = ssm_shape(SsmKind.GDN, heads=1, groups=1, head_dim=2, state_dim=32)
    codes = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    row = torch.cat([codes, codes.flip(0)]) * 448.0
    store = StateStore.allocate(StateFormat.NVFP4, shape, 1, CPU)
    store.store([0], row.expand(1, 1, 2, 32), Rounding.NEAREST, [None])
    got = store.load(torch.tensor([0]))[0, 0]
    assert torch.equal(got, row.expand(2, 32)) and torch.equal(got.signbit(), row.expand(2, 32).signbit())


@pytest.mark.parametrize("fmt", [StateFormat.FP8, StateFormat.NVFP4])
def test_d05_a_scale_is_finite_and_positive_for_any_block(fmt: StateFormat) -> None:
    """D05: a block of zeros, with one tiny value, one huge value, one NaN, one infinity; neighbours are not touched."""
    states = torch.ones(1, 3, 5, 160)
    states[0, 0, 0] = 0.0
    states[0, 0, 1] = 0.0
    states[0, 0, 1, 7] = 1e-44
    states[0, 0, 2, 7] = 3.4e38
    states[0, 1, 3, 7] = float("nan")
    states[0, 1, 4, 7] = float("inf")
    store = StateStore.allocate(fmt, SHAPE, 1, CPU)
    store.store([0], states, Rounding.NEAREST, [None])
    assert store.block_scale is not None
    scales = store.block_scale[0].float()
    assert scales.isfinite().all() and (scales > 0).all()
    got = store.load(torch.tensor([0]))[0]
    assert (got[0, 0] == 0).all()
    assert torch.equal(got[2], states[0, 2]) or fmt is StateFormat.NVFP4
    assert (got[2] - 1).abs().max() <= 2.0**-4  # E4M3 block scale
    finite = torch.ones(5, 160, dtype=torch.bool)
    finite[3, 7] = False
    assert got[1][finite].isfinite().all()
    if fmt is StateFormat.FP8:
        assert got[1, 3, 7].isnan() and got[0, 2, 7].isfinite()
        block = states[0, 0, 2, FP8_BLOCK:]
        assert torch.equal(got[0, 2, FP8_BLOCK:], block)
