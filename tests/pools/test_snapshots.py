"""Snapshots in parts and in files: chains of keys and values, half-written slots, arrays that do not fit (B02)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.pools.pools import contents, scribble, state_pools
from trtllm_replayssm.errors import ContractError, InvariantError
from trtllm_replayssm.runtime.pools.snapshot import RawArray, Snapshot, from_arrays
from trtllm_replayssm.runtime.pools.state_pools import StatePools


def fill_kv(pools: StatePools, slot: int) -> None:
    """Every position's keys and values get numbers of their own."""
    for layer, kv in pools.kv.items():
        for i, tensor in enumerate(kv.tensors()):
            numbers = torch.arange(tensor[slot].numel()).reshape(tensor[slot].shape)
            tensor[slot] = (numbers + 1000 * layer + i).to(tensor.dtype)


def test_a_chain_restores_what_one_snapshot_restores_and_the_later_part_counts() -> None:
    pools = state_pools()
    slot = pools.acquire(5)
    scribble(pools, slot)
    fill_kv(pools, slot)
    whole, digest = pools.save(slot), pools.slot_hash(slot)
    late = pools.save(slot, since=6)
    pools.cursors.position[slot] = 7
    early = pools.save(slot).kv_only()
    wrong = {name: tensor.clone() for name, tensor in early.tensors.items()}
    for tensor in wrong.values():
        tensor[:, 6] += 1  # the shared position, as it looked before its follower was known
    pools.release(slot)
    assert late.nbytes < whole.nbytes and early.nbytes < late.nbytes
    for before in ([early], [replace(early, tensors=wrong)]):
        again = pools.restore(late, before)
        assert pools.slot_hash(again) == digest
        pools.release(again)


@pytest.mark.parametrize("case", ["gap", "no state", "another pool"])
def test_b14_parts_that_are_no_whole_are_refused_and_no_slot_is_taken(case: str) -> None:
    pools = state_pools()
    slot = pools.acquire(5)
    scribble(pools, slot)
    whole, late = pools.save(slot), pools.save(slot, since=6)
    calls: dict[str, Callable[[], int]] = {
        "gap": lambda: pools.restore(late),
        "no state": lambda: pools.restore(whole.kv_only()),
        "another pool": lambda: pools.restore(late, [replace(whole.kv_only(), signature="another")]),
    }
    with pytest.raises(ContractError, match="restore"):
        calls[case]()
    assert pools.slots.num_free == 2


@pytest.mark.parametrize("since", [-1, 10])
def test_keys_and_values_of_positions_that_do_not_exist_are_refused(since: int) -> None:
    pools = state_pools()
    slot = pools.acquire(5)
    scribble(pools, slot)
    with pytest.raises(ContractError, match="since"):
        pools.save(slot, since)


def test_b02_a_copy_that_fails_half_way_gives_the_slot_back_and_its_next_tenant_starts_afresh() -> None:
    """B02: the slot is not in use, so nobody can read it; an allocation after it sees a clean slot."""
    pools, clean = state_pools(), state_pools()
    slot = pools.acquire(5)
    scribble(pools, slot)
    snapshot = pools.save(slot)
    pools.release(slot)
    last = list(snapshot.tensors)[-1]
    broken = replace(snapshot, tensors={n: t for n, t in snapshot.tensors.items() if n != last})
    with pytest.raises(KeyError):
        pools.restore(broken)
    assert pools.slots.num_free == 3 and not pools.carries
    with pytest.raises(InvariantError, match="in use"):
        pools.require_decodable(slot)
    assert pools.acquire(9) == clean.acquire(9) == slot
    assert pools.slot_hash(slot) != "" and registers(pools, slot) == registers(clean, slot)
    for ours, fresh in zip(pools.ssm.values(), clean.ssm.values(), strict=True):
        for a, b in zip(ours.checkpoint.tensors(), fresh.checkpoint.tensors(), strict=True):  # type: ignore[union-attr]
            assert torch.equal(a[slot].view(torch.uint8), b[slot].view(torch.uint8))


def registers(pools: StatePools, slot: int) -> list[int]:
    return [int(r[slot]) for r in pools.cursors.tensors()]


def test_a_given_seed_keys_the_slot_and_nothing_else_changes() -> None:
    pools = state_pools()
    slot = pools.acquire(5)
    scribble(pools, slot)
    snapshot, kept = pools.save(slot), contents(pools, slot)
    other = pools.restore(snapshot, seed=(1 << 64) - 3)
    assert registers(pools, other)[3] == -3
    pools.cursors.seed[other] = 5
    same = [torch.equal(a, b) for a, b in zip(kept, contents(pools, other), strict=True)]
    kv = 2 * len(pools.kv)  # beyond the position these are free memory
    assert all(same[: -kv - 4]) and all(same[-4:])


def arrays(pools: StatePools, in_prompt: bool) -> tuple[Snapshot, dict[str, RawArray]]:
    slot = pools.acquire(7)
    scribble(pools, slot)
    if in_prompt:
        shape = pools.geometry.ssm
        state = torch.randn(shape.heads, shape.head_dim, shape.state_dim)
        pools.carries[slot] = {layer: state * layer for layer in pools.geometry.ssm_layers}
    hidden = torch.ones(1, pools.geometry.hidden)
    snapshot = replace(pools.save(slot), hidden=hidden)
    return snapshot, snapshot.arrays()


@pytest.mark.parametrize("in_prompt", [False, True])
def test_arrays_come_back_byte_for_byte(in_prompt: bool) -> None:
    pools = state_pools()
    snapshot, raw = arrays(pools, in_prompt)
    back = pools.require_snapshot(from_arrays(snapshot.position, pools.signature, raw))
    assert back.named().keys() == snapshot.named().keys() and back.first == 0
    for name, tensor in snapshot.named().items():
        assert back.named()[name].dtype == tensor.dtype
        assert torch.equal(back.named()[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    digest = pools.slot_hash(0)
    assert pools.slot_hash(pools.restore(back)) == digest


def cut(array: RawArray) -> RawArray:
    kind, (first, *rest), data = array
    return kind, (first - 1, *rest), data[: len(data) // first * (first - 1)]


FAULTS: dict[str, tuple[str, Callable[[dict[str, RawArray]], object]]] = {
    "missing": ("window", lambda a: a.pop(next(n for n in a if n.startswith("window")))),
    "extra": ("more", lambda a: a.update({"more": ("uint8", (1,), b"x")})),
    "shape": ("kv", lambda a: a.update({n: cut(a[n]) for n in a if n.startswith("kv")})),
    "type": ("window", lambda a: a.update({n: ("int32", v[1], v[2]) for n, v in a.items() if n.startswith("window")})),
    "unknown type": ("cursor 3", lambda a: a.update({"cursor 3": ("F33", (1,), b"12345678")})),
    "length": ("cursor", lambda a: a.update({"cursor 0": ("int32", (1,), b"\0\0")})),
    "position": ("cursors", lambda a: a.update({"cursor 2": ("int32", (1,), b"\x08\0\0\0")})),
    "h": ("cursors", lambda a: a.update({"cursor 1": ("int32", (1,), b"\x63\0\0\0")})),
    "hidden": ("hidden", lambda a: a.update({"hidden": cut(a["hidden"])})),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_arrays_that_do_not_fit_are_refused_by_name(fault: str) -> None:
    pools = state_pools()
    snapshot, raw = arrays(pools, in_prompt=False)
    words, damage = FAULTS[fault]
    damage(raw)
    with pytest.raises(ContractError, match=f"load_snapshot: {words}"):
        pools.require_snapshot(from_arrays(snapshot.position, pools.signature, raw))


def test_a_carry_of_another_size_and_a_position_beyond_the_pool_are_refused() -> None:
    pools = state_pools()
    snapshot, raw = arrays(pools, in_prompt=True)
    name = next(n for n in raw if n.startswith("carry"))
    with pytest.raises(ContractError, match=name):
        pools.require_snapshot(from_arrays(snapshot.position, pools.signature, raw | {name: cut(raw[name])}))
    with pytest.raises(ContractError, match=name):
        pools.require_snapshot(from_arrays(9, pools.signature, {n: a for n, a in raw.items() if n != name}))
    with pytest.raises(ContractError, match="position"):
        pools.require_snapshot(from_arrays(33, pools.signature, raw))
