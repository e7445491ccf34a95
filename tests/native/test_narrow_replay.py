"""Narrow states under CUDA graphs and repetition: replays follow the cursors, a hundred launches give one result."""

from __future__ import annotations

from typing import Any

import pytest

from tests.native import harness
from tests.native.device_pool import SLOTS, DevicePool, make_twin
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

FP32, FP16, FP8, FP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4
FORMATS = [
    pytest.param(FP16, None, id="float16"),
    pytest.param(FP8, None, id="fp8"),
    pytest.param(FP16, FP4, id="float16-nvfp4"),
    pytest.param(FP32, FP4, id="float32-nvfp4"),
]
KINDS = [pytest.param(SsmKind.MAMBA2, 64, id="mamba2"), pytest.param(SsmKind.GDN, 128, id="gdn")]


@pytest.mark.parametrize(("recurrence", "read"), FORMATS)
@pytest.mark.parametrize(("kind", "head_dim"), KINDS)
def test_graph_replay_follows_the_cursors(
    library: _abi.Library, kind: SsmKind, head_dim: int, recurrence: StateFormat, read: StateFormat | None
) -> None:
    """Two steps captured once, the second with programmatic launch, replayed through several flushes of each slot."""
    import torch

    twin = make_twin(library, kind, head_dim, (recurrence, read))
    slots = [2, 0, -1, 1]
    rows = twin.inputs(slots, [1] * 4, 1)
    eager, replayed = DevicePool(twin, rows, slots), DevicePool(twin, rows, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for flags in (0, _abi.UPDATE_PROGRAMMATIC_LAUNCH):
            replayed.update(flags)
            replayed.commit()
    start = [int(h) for h in eager.cursors["h"]]
    for _ in range(7):
        fresh = twin.inputs(slots, [1] * 4, 1)
        for pool in (eager, replayed):
            for name, tensor in fresh.items():
                pool.inputs[name].copy_(tensor)
        graph.replay()
        for _ in range(2):
            eager.update()
            eager.commit()
        torch.cuda.synchronize()
        got, expected = replayed.bits(), eager.bits()
        assert [name for name in got if not torch.equal(got[name], expected[name])] == []
    assert [int(h) for h in eager.cursors["h"]] != start, "the cursors moved"
    assert torch.isfinite(eager.out[[0, 1, 3]].float()).all()


@pytest.mark.parametrize(("recurrence", "read"), FORMATS)
@pytest.mark.parametrize(("kind", "head_dim"), KINDS)
def test_hundred_identical_launches_give_one_result(
    library: _abi.Library, kind: SsmKind, head_dim: int, recurrence: StateFormat, read: StateFormat | None
) -> None:
    """Slot 2 flushes, the others read."""
    import torch

    twin = make_twin(library, kind, head_dim, (recurrence, read))
    slots = list(range(SLOTS))
    pool = DevicePool(twin, twin.inputs(slots, [1] * SLOTS, 1), slots)
    saved = {name: tensor.clone() for name, tensor in pool.state.items()}
    first: dict[str, Any] = {}
    for _ in range(100):
        for name, tensor in saved.items():
            pool.state[name].copy_(tensor)
        pool.out.fill_(float("nan"))
        pool.update()
        bits = pool.bits()
        first = first or bits
        assert [name for name in bits if not torch.equal(bits[name], first[name])] == []
    folded, before = (t["checkpoint"][2].view(torch.uint8) for t in (pool.state, saved))
    assert not torch.equal(folded, before), "slot 2 was folded"
