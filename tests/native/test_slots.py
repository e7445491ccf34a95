"""Slots that change hands: cursors and states of the given slots are as new, everything else keeps its bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from trtllm_replayssm.dtypes import StateFormat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from tests.native.stores import poisoned_store, same_bits, store_views
    from trtllm_replayssm.ops import _abi
    from trtllm_replayssm.shapes import SsmKind


def strided(values: list[int], dtype: Any) -> Any:
    """[R] with a stride of two elements on the device."""
    wide = torch.full((len(values), 2), -7, dtype=dtype)
    wide[:, 0] = torch.tensor(values, dtype=dtype)
    return wide.cuda()[:, 0]


@pytest.mark.parametrize("with_position", [True, False])
def test_cursors_of_the_given_slots_are_as_new(library: _abi.Library, with_position: bool) -> None:
    slots, seeds, positions = [4, -1, 0, 299], [2**62 + 3, 5, -9, 7], [11, 12, 13, 14]
    cursors = {name: torch.arange(1, 301, dtype=torch.int32).cuda() for name in ("origin", "h", "position")}
    cursors["seed"] = torch.arange(1, 301).cuda()
    expected = {name: tensor.cpu().clone() for name, tensor in cursors.items()}
    for slot, seed, position in zip(slots, seeds, positions, strict=True):
        if slot >= 0:
            values = {"origin": 0, "h": 0, "position": position if with_position else 0, "seed": seed}
            for name, value in values.items():
                expected[name][slot] = value
    inputs = {"slot": strided(slots, torch.int32), "new_seed": strided(seeds, torch.int64)}
    if with_position:
        inputs["new_position"] = strided(positions, torch.int32)
    args = _abi.ResetSlotsArgs(**{name: harness.view(t) for name, t in (inputs | cursors).items()})
    library.reset_slots(args, harness.Pool._stream())
    for name, tensor in cursors.items():
        assert torch.equal(tensor.cpu(), expected[name]), name


@pytest.mark.parametrize("read", [None, "float16", "fp8", "nvfp4"])
@pytest.mark.parametrize("recurrence", ["float32", "float16", "fp8"])
def test_states_of_the_given_slots_are_zero_with_scales_of_one(
    library: _abi.Library, recurrence: str, read: str | None
) -> None:
    shape = ssm_shape(SsmKind.MAMBA2, heads=3, groups=1, head_dim=20, state_dim=48)
    formats = [StateFormat(recurrence), *([StateFormat(read)] if read else [])]
    stores = [poisoned_store(fmt, shape, slots=6) for fmt in formats]
    expected = [poisoned_store(fmt, shape, slots=6) for fmt in formats]
    for store in expected:
        for slot in (5, 2):
            store.clear(slot)
    views = store_views("checkpoint", stores[0]) | (store_views("read", stores[1]) if read else {})
    chosen = strided([5, -1, 2], torch.int32)
    library.clear_state(_abi.ClearStateArgs(slot=harness.view(chosen), **views), harness.Pool._stream())
    for store, want in zip(stores, expected, strict=True):
        assert same_bits(store, want)


def test_a_pool_whose_slots_are_far_apart(library: _abi.Library) -> None:
    """Slots as slices of a larger array, at addresses that are no multiple of 16 bytes."""
    whole = torch.full((4, 2 * 3 * 5 + 3), 7.0, device="cuda")
    states = torch.as_strided(whole, (4, 2, 3, 5), (33, 15, 5, 1), 1)
    chosen = strided([3, 1], torch.int32)
    args = _abi.ClearStateArgs(slot=harness.view(chosen), checkpoint=harness.view(states))
    library.clear_state(args, harness.Pool._stream())
    expected = torch.full((4, 33), 7.0)
    expected[1, 1:31] = expected[3, 1:31] = 0.0
    assert torch.equal(whole.cpu(), expected)
