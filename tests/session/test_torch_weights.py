"""The cache of decoded experts: bounded in bytes, least recently used out first, and never a change of any value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.session.sessions import CPU, NAMES, checkpoint, force, sequence, start
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import DEFAULT_EXPERT_CACHE_BYTES, TorchWeights

MODELS = tuple(name for name in NAMES if checkpoint(name).geometry.moe is not None)


class Watched(TorchWeights):
    """Looks into the cache after every use and counts what had to be decoded."""

    def __init__(self, name: str, limit: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(checkpoint(name), dtype, CPU, limit)
        self.limit = limit
        self.uses = self.decoded = self.largest = 0

    def expert(self, name: str, expert: int) -> torch.Tensor:
        before = self.resident()
        weight = super().expert(name, expert)
        held = sum(t.numel() * t.element_size() for t in self._experts.values())
        assert held == self._expert_bytes <= max(self.limit, weight.numel() * weight.element_size())
        assert self.resident()[-1] == (name, expert)
        self.uses, self.decoded = self.uses + 1, self.decoded + ((name, expert) not in before)
        self.largest = max(self.largest, held)
        return weight

    def resident(self) -> list[tuple[str, int]]:
        """Least recently used first."""
        return list(self._experts)


def stack(name: str) -> tuple[str, int]:
    """A stack of experts of the model, and the float32 bytes of one."""
    opened = checkpoint(name)
    found = next(n for n in opened.names() if n.endswith("experts.up_proj"))
    return found, int(np.prod(opened.spec(found).shape[1:])) * 4


def test_the_least_recently_used_expert_is_dropped_first() -> None:
    up, size = stack(MODELS[0])
    weights = Watched(MODELS[0], 3 * size)
    for expert in (0, 1, 2, 0, 3):  # 1 is the one not used for longest
        weights.expert(up, expert)
    assert weights.resident() == [(up, 2), (up, 0), (up, 3)] and weights.decoded == 4
    kept = weights.expert(up, 2)
    assert weights.decoded == 4 and kept is weights.expert(up, 2)
    weights.expert(up, 1)
    assert weights.resident() == [(up, 3), (up, 2), (up, 1)] and weights.decoded == 5


@pytest.mark.parametrize(("experts", "resident"), [(0, 1), (0.5, 1), (1, 1), (1.99, 1), (2, 2), (3.5, 3)])
def test_the_cache_holds_what_fits_and_always_the_expert_in_use(experts: float, resident: int) -> None:
    up, size = stack(MODELS[0])
    weights = Watched(MODELS[0], int(experts * size))
    for expert in (0, 1, 2, 3, 0, 1, 2, 3):
        weights.expert(up, expert)
    assert len(weights.resident()) == resident and weights._expert_bytes == resident * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_stored_type_and_an_evicted_expert_comes_back_the_same(dtype: torch.dtype) -> None:
    up, size = stack(MODELS[0])
    weights = Watched(MODELS[0], size, dtype)
    fit = 4 // dtype.itemsize
    first = weights.expert(up, 0).clone()
    for expert in (1, 2, 3):
        weights.expert(up, expert)
    assert len(weights.resident()) == fit and (up, 0) not in weights.resident()
    again = weights.expert(up, 0)
    exact = torch.from_numpy(checkpoint(MODELS[0]).experts(up).matrix(0).dequantize(np.float32))
    assert again.dtype is dtype and torch.equal(first, again) and torch.equal(again, exact.to(dtype))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_same_bits_whatever_the_cache_holds(name: str) -> None:
    _, size = stack(name)
    found, counts = [], []
    for limit in (0, 3 * size, DEFAULT_EXPERT_CACHE_BYTES):
        weights = Watched(name, limit)
        pool = PoolConfig(slots=1, max_seq_len=64, activation=ActivationDtype.FLOAT32)
        pools = StatePools.allocate(
            checkpoint(name).geometry, ReplayConfig(window=4, max_step_tokens=1), pool, conventional=False, device=CPU
        )
        session = TorchSession(weights, pools, debug=True)
        slot, first = start(session, sequence(name)[:9])
        found.append(np.concatenate([first[None], force(session, slot, sequence(name)[9:17])]))
        counts.append((weights.decoded, weights.uses))
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[2])
    assert counts[0][1] == counts[1][1] == counts[2][1]
    assert counts[0][0] > counts[2][0] == len(weights.resident()) and counts[1][0] > counts[2][0]
