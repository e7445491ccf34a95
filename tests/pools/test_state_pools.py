"""Pools of all state: reset on reuse, snapshots, forks, hashes, sizes, and refusals that leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.pools.pools import GEOMETRIES, TWO_PRECISIONS, contents, everything, scribble, state_pools
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.errors import CapacityError, ContractError, InvariantError, ReplaySSMError
from trtllm_replayssm.runtime.pools.state_pools import StatePools

BIG_SEED = 0xFEDC_BA98_7654_3210


def registers(pools: StatePools, slot: int) -> list[int]:
    return [int(t[slot]) for t in pools.cursors.tensors()]


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("conventional", [False, True])
def test_a01_a_reused_slot_has_fresh_registers_and_zero_states(name: str, conventional: bool) -> None:
    """A01, B01: whatever the last tenant left, NaN included."""
    for garbage in (0x3C, 0x7F, 0xFF):
        pools = state_pools(name, conventional=conventional)
        slot = pools.acquire(5)
        scribble(pools, slot, garbage)
        pools.carries[slot] = {0: torch.ones(1)}
        pools.release(slot)
        assert pools.acquire(BIG_SEED) == slot
        assert registers(pools, slot) == [0, 0, 0, BIG_SEED - (1 << 64)]
        assert slot not in pools.carries
        fresh = state_pools(name, conventional=conventional)
        fresh.acquire(BIG_SEED)
        for ours, clean in zip(pools.ssm.values(), fresh.ssm.values(), strict=True):
            checkpoints = ours.tensors() if conventional else ours.checkpoint.tensors() + ours.read_copy.tensors()  # type: ignore[union-attr]
            expected = clean.tensors() if conventional else clean.checkpoint.tensors() + clean.read_copy.tensors()  # type: ignore[union-attr]
            for a, b in zip(checkpoints, expected, strict=True):
                assert torch.equal(a[slot].view(torch.uint8), b[slot].view(torch.uint8))


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("activation", list(ActivationDtype))
@pytest.mark.parametrize("in_prompt", [False, True])
def test_a_snapshot_restores_into_another_slot_byte_for_byte(
    name: str, activation: ActivationDtype, in_prompt: bool
) -> None:
    """Between two chunks of a prompt the carry is the state: checkpoints and rings are left out, and smaller it is."""
    pools = state_pools(name, activation=activation)
    first, second = pools.acquire(1), pools.acquire(BIG_SEED)
    scribble(pools, first, 0x11)
    scribble(pools, second, 0x3C)
    layer = pools.geometry.ssm_layers[0]
    whole = pools.save(second).nbytes
    if in_prompt:
        pools.carries[second] = {layer: torch.full((2, 2), 3.0)}
    snapshot, digest = pools.save(second), pools.slot_hash(second)
    kept = contents(pools, first)
    pools.release(second)
    scribble(pools, second, 0x7F)
    other = state_pools(name, activation=activation, slots=5)
    for target in (pools, other):
        slot = target.restore(snapshot)
        assert target.slot_hash(slot) == digest
        assert registers(target, slot) == [5, 2, 9, BIG_SEED - (1 << 64)]
        assert not in_prompt or torch.equal(target.carries[slot][layer], torch.full((2, 2), 3.0))
        assert (slot in target.carries) == in_prompt
    assert all(torch.equal(a, b) for a, b in zip(kept, contents(pools, first), strict=True))
    assert snapshot.position == 9 and (snapshot.nbytes < whole if in_prompt else snapshot.nbytes == whole)
    if in_prompt:
        pools.carries[second][layer].fill_(7.0)  # the snapshot keeps its own
        assert torch.equal(snapshot.carry[layer], torch.full((2, 2), 3.0))


def test_a_fork_copies_everything_but_the_seed() -> None:
    pools = state_pools()
    slot = pools.acquire(3)
    scribble(pools, slot)
    before = contents(pools, slot)
    copy = pools.fork(slot, BIG_SEED)
    assert registers(pools, copy) == [5, 2, 9, BIG_SEED - (1 << 64)]
    assert all(torch.equal(a, b) for a, b in zip(before, contents(pools, slot), strict=True))
    pools.cursors.seed[copy] = pools.cursors.seed[slot]
    assert pools.slot_hash(copy) == pools.slot_hash(slot)
    scribble(pools, copy, 0x11)
    assert all(torch.equal(a, b) for a, b in zip(before, contents(pools, slot), strict=True))


def test_a_full_pool_refuses_and_stays_whole() -> None:
    pools = state_pools(slots=2)
    slot, _ = pools.acquire(1), pools.acquire(2)
    scribble(pools, slot)
    snapshot, before = pools.save(slot), [contents(pools, s) for s in (0, 1)]
    calls: list[Callable[[], int]] = [
        lambda: pools.acquire(3), lambda: pools.fork(slot, 3), lambda: pools.restore(snapshot),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CapacityError, match="all 2 in use"):
            call()
    for old, s in zip(before, (0, 1), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, contents(pools, s), strict=True))
    pools.check_integrity()


MISFITS = [
    {"name": "nemotron-dense"},
    {"replay": replace(TWO_PRECISIONS, window=5)},
    {"replay": ReplayConfig(window=4, max_step_tokens=3)},
    {"activation": ActivationDtype.BFLOAT16},
    {"conventional": True},
    {"max_seq_len": 8},
]


@pytest.mark.parametrize("misfit", MISFITS, ids=lambda m: "-".join(m))
def test_b02_a_snapshot_that_does_not_fit_is_refused_and_no_slot_is_taken(misfit: dict[str, object]) -> None:
    """B02: nothing is published half-initialised; also a snapshot longer than the pool's sequences."""
    source = state_pools()
    slot = source.acquire(1)
    scribble(source, slot)
    snapshot = source.save(slot)
    target = state_pools(**misfit)  # type: ignore[arg-type]
    target.acquire(9)
    scribble(target, 0)
    before, free = contents(target, 0), target.slots.num_free
    with pytest.raises(ContractError, match="restore: snapshot"):
        target.restore(snapshot)
    assert target.slots.num_free == free
    assert all(torch.equal(a, b) for a, b in zip(before, contents(target, 0), strict=True))


def test_a_snapshot_of_an_equally_named_model_of_other_sizes_is_refused() -> None:
    source = state_pools()
    snapshot = source.save(source.acquire(1))
    target = state_pools()
    target.geometry = replace(target.geometry, layers=target.geometry.layers[:-1])
    with pytest.raises(ContractError, match="restore: snapshot"):
        target.restore(snapshot)
    assert target.slots.num_free == 3


@pytest.mark.parametrize("seed", [-1, 1 << 64, 1 << 70])
def test_a_seed_beyond_64_bits_is_refused_and_no_slot_is_taken(seed: int) -> None:
    pools = state_pools()
    with pytest.raises(ContractError, match="seed"):
        pools.acquire(seed)
    slot = pools.acquire((1 << 64) - 1)
    with pytest.raises(ContractError, match="seed"):
        pools.fork(slot, seed)
    assert pools.slots.num_free == 2


@pytest.mark.parametrize("slot", [-1, 1, 7])
def test_calls_on_a_slot_that_is_not_in_use_are_refused(slot: int) -> None:
    pools = state_pools()
    pools.acquire(1)
    calls = (pools.release, pools.save, pools.require_decodable, lambda s: pools.fork(s, 2))
    for call in calls:
        with pytest.raises(InvariantError, match="in use"):
            call(slot)
    assert pools.slots.used == {0}


def test_a_hash_sees_every_live_byte_and_no_other_slot() -> None:
    pools = state_pools()
    slot, other = pools.acquire(1), pools.acquire(2)
    for s in (slot, other):
        scribble(pools, s)
    digest = pools.slot_hash(slot)
    for tensor in [*everything(pools), *pools.cursors.tensors()]:
        first = tensor[slot].reshape(-1) if tensor.ndim == 1 else tensor[slot].flatten()[:1]
        kept = tensor[slot].clone()
        raw = tensor[slot : slot + 1].view(torch.uint8)
        raw.view(-1)[0] ^= 1
        assert pools.slot_hash(slot) != digest, (tensor.shape, first)
        tensor[slot].copy_(kept)
        tensor[other : other + 1].view(torch.uint8).view(-1)[0] ^= 1
    assert pools.slot_hash(slot) == digest


@pytest.mark.parametrize("name", GEOMETRIES)
def test_sizes_add_up_to_the_tensors(name: str) -> None:
    pools = state_pools(name)
    total = sum(t.numel() * t.element_size() for t in [*everything(pools), *pools.cursors.tensors()])
    sizes = pools.nbytes()
    assert sum(sizes.values()) == total and all(size > 0 for size in sizes.values())


@pytest.mark.parametrize(
    "register,value", [("h", 5), ("h", -1), ("origin", 7), ("origin", -1), ("position", 1), ("position", 33)]
)
def test_cursors_out_of_range_are_found(register: str, value: int) -> None:
    pools = state_pools()
    slot = pools.acquire(1)
    scribble(pools, slot)
    pools.check_integrity()
    getattr(pools.cursors, register)[slot] = value
    with pytest.raises(InvariantError, match="cursors of slot"):
        pools.check_integrity()
    pools.release(slot)
    pools.check_integrity()
    pools.carries[slot] = {}
    with pytest.raises(InvariantError, match="carries"):
        pools.check_integrity()
    assert issubclass(InvariantError, ReplaySSMError)
