"""The poisoner fills everything that nobody may read, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.pools.pools import GEOMETRIES, TWO_PRECISIONS, contents, everything, scribble, state_pools
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops.layer_state import ConventionalLayerState, ReplayLayerState
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.pools.state_pools import StatePools

FORMATS = [ReplayConfig(window=4, max_step_tokens=3), TWO_PRECISIONS]


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    """NaN, or for packed codes the byte that stands for it."""
    return tensor == 0xFF if tensor.dtype is torch.uint8 else tensor.float().isnan()


def used_and_free(name: str, replay: ReplayConfig, *, conventional: bool = False) -> StatePools:
    pools = state_pools(name, replay, conventional=conventional)
    for seed in (1, 2, 3):
        scribble(pools, pools.acquire(seed))
    if conventional:
        pools.cursors.h[:], pools.cursors.origin[:] = 0, 2
    pools.release(1)
    return pools


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("replay", FORMATS, ids=["float32", "two-precisions"])
@pytest.mark.parametrize("conventional", [False, True])
def test_every_element_of_a_free_slot_is_poisoned(name: str, replay: ReplayConfig, conventional: bool) -> None:
    pools = used_and_free(name, replay, conventional=conventional)
    poison_dead_memory(pools)
    for tensor in everything(pools):
        assert is_nan(tensor[1]).all()
        assert not is_nan(tensor[0]).all()
    for register in pools.cursors.tensors():
        assert int(register[1]) == torch.iinfo(register.dtype).min


@pytest.mark.parametrize("name", GEOMETRIES)
def test_dead_records_taps_and_positions_of_a_used_slot_are_poisoned_and_live_ones_kept(name: str) -> None:
    """origin 5, h 2, position 9 of a ring of 7 rows: records 5, 6 live; K = 4: positions 6, 7, 8 of 6 rows live."""
    pools = used_and_free(name, FORMATS[1])
    before = pools.slot_hash(0)
    live = {t.data_ptr(): t[0].clone() for t in everything(pools)}
    poison_dead_memory(pools)
    for state in pools.ssm.values():
        assert isinstance(state, ReplayLayerState)
        for ring in state.ring_tensors():
            dead = is_nan(ring[0]).flatten(2).all(-1) if ring.ndim > 3 else is_nan(ring[0])
            assert dead.all(0).tolist() == [True] * 5 + [False] * 2 and not dead.any(0)[5:].any()
        for copy in (state.checkpoint, state.read_copy):
            assert copy is not None
            for tensor in copy.tensors():
                assert torch.equal(tensor[0].view(torch.uint8), live[tensor.data_ptr()].view(torch.uint8))
    for window in pools.windows.values():
        assert is_nan(window[0]).all(-1).tolist() == [False, False, False, True, True, True]
    heads = len(pools.geometry.layers)
    for layer, kv in pools.kv.items():
        for tensor in kv.tensors():
            assert not is_nan(tensor[0, :, :9]).any()
            assert is_nan(tensor[0, :, 9:]).all() == (layer < heads)  # drafts of the MTP head live there
    assert pools.slot_hash(0) != before  # ring bytes count, so hashes are taken after poisoning
    once = contents(pools, 0)
    poison_dead_memory(pools)
    assert all(torch.equal(a, b) for a, b in zip(once, contents(pools, 0), strict=True))


def test_only_the_current_state_of_a_conventional_slot_is_kept() -> None:
    pools = used_and_free("qwen-moe", FORMATS[0], conventional=True)
    poison_dead_memory(pools)
    for state in pools.ssm.values():
        assert isinstance(state, ConventionalLayerState)
        assert is_nan(state.states[0]).flatten(1).all(-1).tolist() == [True, True, False, True]
