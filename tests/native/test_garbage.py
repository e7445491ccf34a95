"""Slot ids and cursors far out of range do no harm: engine builders time candidates with uninitialised inputs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.device_pool import SLOTS, DevicePool, make_twin
from tests.native.twin import Twin, torch_module
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

FAR = [2**31 - 1, 0x7F7F7F7F, 5, -2, -(2**31)]  # the pool has five slots


def bits(tensor: Any) -> Any:
    torch = torch_module()
    return tensor.clone().view(torch.uint8)


@pytest.mark.parametrize("padding", [0, 150], ids=["small", "large"])
@pytest.mark.parametrize(
    ("kind", "head_dim", "tokens"),
    [(SsmKind.MAMBA2, 64, 1), (SsmKind.MAMBA2, 64, 4), (SsmKind.GDN, 128, 1), (SsmKind.GDN, 128, 4)],
)
def test_rows_that_name_no_slot_change_nothing(
    library: _abi.Library, kind: SsmKind, head_dim: int, tokens: int, padding: int
) -> None:
    torch = torch_module()
    shape = ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128)
    twin = Twin(library, shape, ReplayConfig(window=8, max_step_tokens=tokens), "bfloat16", slots=5)
    for slot in range(5):
        twin.admit(slot)
    before = {name: bits(tensor) for name, tensor in twin.pool.tensors.items()}
    slots = FAR + [-1] * padding
    rows = twin.make_rows(slots, [tokens] * len(slots), tokens)
    rows["slot"] = torch.tensor(slots, dtype=torch.int32, device="cuda")
    out = torch.full(tuple(rows["value"].shape), float("nan"), dtype=twin.dtype, device="cuda")
    twin.pool.update(rows, out)
    counts = torch.full((len(slots),), tokens, dtype=torch.int32, device="cuda")
    twin.pool.commit(rows["slot"], counts, counts)
    torch.cuda.synchronize()
    assert (out == 0).all()
    for name, tensor in twin.pool.tensors.items():
        assert torch.equal(bits(tensor), before[name]), name


@pytest.mark.parametrize("cursor", [2**31 - 1, -(2**31), 0x7F7F7F7F])
@pytest.mark.parametrize(("kind", "head_dim"), [(SsmKind.MAMBA2, 64), (SsmKind.GDN, 128)])
def test_cursors_out_of_range_stay_within_their_slot(
    library: _abi.Library, kind: SsmKind, head_dim: int, cursor: int
) -> None:
    torch = torch_module()
    shape = ssm_shape(kind, heads=8, groups=2, head_dim=head_dim, state_dim=128)
    twin = Twin(library, shape, ReplayConfig(window=8, max_step_tokens=4), "bfloat16", slots=5)
    for slot in range(5):
        twin.admit(slot)
    for name in ("origin", "h"):
        twin.pool.tensors[name][2] = cursor
    others = [0, 1, 3, 4]
    before = {name: bits(tensor[others]) for name, tensor in twin.pool.tensors.items()}
    rows = twin.make_rows([2], [4], 4)
    out = torch.empty(tuple(rows["value"].shape), dtype=twin.dtype, device="cuda")
    twin.pool.update(rows, out)
    counts = torch.full((1,), 4, dtype=torch.int32, device="cuda")
    twin.pool.commit(rows["slot"], counts, counts)
    torch.cuda.synchronize()
    for name, tensor in twin.pool.tensors.items():
        assert torch.equal(bits(tensor[others]), before[name]), name
    assert 0 <= int(twin.pool.tensors["h"][2]) <= 8
    assert 0 <= int(twin.pool.tensors["origin"][2]) < twin.config.ring_rows


NARROW = [
    (SsmKind.MAMBA2, 64, StateFormat.FLOAT16, None),
    (SsmKind.MAMBA2, 80, StateFormat.FLOAT32, StateFormat.NVFP4),
    (SsmKind.GDN, 128, StateFormat.FLOAT16, None),
    (SsmKind.GDN, 128, StateFormat.FLOAT32, StateFormat.NVFP4),
]


@pytest.mark.parametrize(("kind", "head_dim", "recurrence", "read"), NARROW)
def test_narrow_states_take_no_harm_from_ids_and_cursors(
    library: _abi.Library, kind: SsmKind, head_dim: int, recurrence: StateFormat, read: StateFormat | None
) -> None:
    """Slots that do not exist change nothing; cursors out of range change nothing beyond their slot."""
    torch = torch_module()
    twin = make_twin(library, kind, head_dim, (recurrence, read))
    slots = [2**31 - 1, SLOTS, -2, -(2**31)]
    pool = DevicePool(twin, twin.inputs([-1] * 4, [1] * 4, 1), slots)
    before = pool.bits()
    pool.update()
    torch.cuda.synchronize()
    assert (pool.out == 0).all()
    assert [name for name, found in pool.bits().items() if name != "out" and not torch.equal(found, before[name])] == []

    pool = DevicePool(twin, twin.inputs([1], [1], 1), [1])
    pool.cursors["origin"][1], pool.cursors["h"][1] = 2**31 - 1, -(2**31)
    others = {name: bits(tensor)[[0, 2]] for name, tensor in pool.state.items()}
    pool.update()
    torch.cuda.synchronize()
    assert [name for name, tensor in pool.state.items() if not torch.equal(bits(tensor)[[0, 2]], others[name])] == []
