"""Steps whose rows are all full and flush together or not at all, as the host knows: the session's own bits, with
nothing read back; and attention of all rows at once against attention row by row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.session.sessions import CPU, FAMILIES, checkpoint, hashes, open_session, sequence, start, weights
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, Rounding, StateFormat
from trtllm_replayssm.runtime.pools.kv_pool import KvLayer
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session import torch_state_ops
from trtllm_replayssm.runtime.session.base import DecodeRow
from trtllm_replayssm.runtime.session.decode_attention import attend_masked, decode_attention
from trtllm_replayssm.runtime.session.torch_session import TorchSession

WINDOW = 4
CONVENTIONAL = "conventional"
POOLS: dict[str, dict[str, Any]] = {
    "shared float32": {},
    "shared fp8, stochastic": {"recurrence": StateFormat.FP8},
    "shared float16, nearest": {"recurrence": StateFormat.FLOAT16, "recurrence_rounding": Rounding.NEAREST},
    "fp8 beside float32": {"read": StateFormat.FP8},
}


@pytest.mark.parametrize("pool", [*POOLS, CONVENTIONAL])
@pytest.mark.parametrize("name", FAMILIES)
def test_full_steps_are_those_of_the_session(name: str, pool: str) -> None:
    conventional, formats = pool == CONVENTIONAL, POOLS.get(pool, {})
    session, judge = (
        open_session(name, window=WINDOW, widest=WINDOW - 1, conventional=conventional, **formats) for _ in range(2)
    )
    ids = sequence(name)
    slots = [start(session, ids[:n])[0] for n in (9, 17)]
    assert slots == [start(judge, ids[:n])[0] for n in (9, 17)]
    h = 0
    # flushes at h = 4 and 3; the last step flushes three records and appends two
    for width in (3, 1, 1, 3, 1, 2):
        flush = not conventional and h + width > WINDOW
        step = session.static_step(batch=2, width=width, flushes=flush)
        step.slot.copy_(torch.tensor(slots))
        step.num_tokens.fill_(width)
        step.ids.copy_(torch.tensor([ids[20 : 20 + width], ids[30 : 30 + width]]))
        logits = step.forward().logits
        step.commit(torch.tensor([width, width]))
        want = judge.decode([DecodeRow(slots[0], ids[20 : 20 + width]), DecodeRow(slots[1], ids[30 : 30 + width])])
        judge.commit([width, width])
        h = (0 if flush else h) + width
        assert all((ours.numpy() == theirs).all() for ours, theirs in zip(logits, want, strict=True))
        for each in (session, judge):
            poison_dead_memory(each.pools)  # what means nothing may differ
        assert hashes(session) == hashes(judge)
        assert [session.cursors(s) for s in slots] == [judge.cursors(s) for s in slots]


@pytest.mark.parametrize("pool", [*POOLS, CONVENTIONAL])
@pytest.mark.parametrize("name", ["nemotron-dense", "qwen-dense"])
def test_nothing_is_read_back(name: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a value, nor a size that only the device knows: the steps can be captured."""
    conventional = pool == CONVENTIONAL
    replay = ReplayConfig(window=WINDOW, max_step_tokens=WINDOW - 1, **POOLS.get(pool, {}))
    geometry = checkpoint(name).geometry
    pools = StatePools.allocate(
        geometry, replay, PoolConfig(slots=2, max_seq_len=160, activation=ActivationDtype.FLOAT32),
        conventional=conventional, device=CPU,
    )  # fmt: skip
    session = TorchSession(weights(name, ActivationDtype.FLOAT32), pools)
    slots = [start(session, sequence(name)[:9])[0] for _ in range(2)]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a value was read back")

    monkeypatch.setattr(torch_state_ops, "decode_attention", attend_masked)  # what CUDA has for float32
    for width, flush in ((3, False), (1, False), (1, True)):
        step = session.static_step(batch=2, width=width, flushes=flush and not conventional)
        step.slot.copy_(torch.tensor(slots))
        step.num_tokens.fill_(width)
        accepted = torch.tensor([width, width])
        with monkeypatch.context() as patch:
            for read in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy"):
                patch.setattr(torch.Tensor, read, refuse)
            patch.setattr(torch, "nonzero", refuse)
            step.forward()
            step.commit(accepted)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 1), (3, 3)])
def test_attention_of_all_rows_at_once_is_that_of_each(heads: int, kv_heads: int) -> None:
    """Rows of other lengths, a short one, one without tokens and padding; unwritten places hold NaN."""
    g = torch.Generator().manual_seed(1)
    caches = [KvLayer(*(torch.randn(4, kv_heads, 12, 8, generator=g) for _ in range(2)))]
    slot, start_at, count = torch.tensor([2, 0, -1, 3]), torch.tensor([5, 1, 0, 4]), torch.tensor([3, 2, 0, 0])
    for tensor in caches[0].tensors():
        for place, first in zip(slot.tolist(), start_at.tolist(), strict=True):
            if place >= 0:
                tensor[place, :, first:] = float("nan")
    caches.append(KvLayer(*(t.clone() for t in caches[0].tensors())))
    q, k, v = (torch.randn(4, 3, n, 8, generator=g) for n in (heads, kv_heads, kv_heads))
    one, all_rows = (
        attend(q, k, v, kv, slot=slot, start=start_at, num_tokens=count)
        for attend, kv in zip((decode_attention, attend_masked), caches, strict=True)
    )
    torch.testing.assert_close(all_rows, one, rtol=0, atol=1e-6)
    for ours, theirs in zip(caches[1].tensors(), caches[0].tensors(), strict=True):
        for place, end in ((2, 8), (0, 3), (3, 4)):
            assert torch.equal(ours[place, :, :end], theirs[place, :, :end])
