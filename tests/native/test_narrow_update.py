"""The native Mamba-2 update with narrow states: every recurrence and read format against the reference operations."""

from __future__ import annotations

import numpy as np
import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.narrow import CASES, FP4, FP16, FP32, NarrowTwin, config, state_tensors
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ContractError, UnsupportedError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind, SsmShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]


def shape(head_dim: int, heads: int = 24) -> SsmShape:
    return ssm_shape(SsmKind.MAMBA2, heads=heads, groups=2, head_dim=head_dim, state_dim=128)


@pytest.mark.parametrize("padding", [0, 300], ids=["small", "large"])
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(("recurrence", "read"), CASES)
def test_plain_steps_match_the_reference_at_every_fill(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None, head_dim: int, act: str, padding: int
) -> None:
    """Rows that flush beside rows that do not, padding rows (which swell the batch), rows without a token."""
    twin = NarrowTwin(library, shape(head_dim), config(recurrence, read), act, slots=7)
    for slot, (h, origin) in enumerate([(0, 0), (1, 16), (7, 3), (8, 12), (15, 9), (16, 0), (16, 5)]):
        twin.admit(slot, h, origin)
    twin.step([3, 5, -1, 0, 6, 2, 1, 4] + [-1] * padding, [1, 1, 1, 1, 1, 0, 1, 1] + [1] * padding, tokens=1)
    twin.check_neighbours()


@pytest.mark.parametrize("window", [1, 3, 8, 16, 40, 64])
@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(("recurrence", "read"), [CASES[2], CASES[3], CASES[6]])
def test_verification_matches_the_reference_in_any_window(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None, head_dim: int, tokens: int, window: int
) -> None:
    if tokens > window:
        pytest.skip("T_max <= L")
    twin = NarrowTwin(library, shape(head_dim, heads=8), config(recurrence, read, window, tokens), "bfloat16", slots=6)
    fills = [0, window // 2, max(window - tokens, 0), window - tokens + 1, window, min(17, window)]
    for slot, h in enumerate(fills):
        twin.admit(slot, h, origin=(slot * 7) % twin.config.ring_rows)
    twin.step([5, -1, 3, 4, 0, 2, 1], [tokens, tokens, tokens, max(tokens - 1, 1), tokens, tokens, 1], tokens)
    twin.check_neighbours()


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(("recurrence", "read"), CASES)
def test_equal_folds_give_equal_bits(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None, head_dim: int
) -> None:
    """One record, no decay, small whole numbers: both folds are one addition, so every code and scale must agree."""
    twin = NarrowTwin(library, shape(head_dim, heads=8), config(recurrence, read, 8, 8), "bfloat16", slots=3)
    twin.a[:] = 0.0
    for slot in range(3):
        twin.admit(slot, h=1, origin=2 * slot)
        row = 2 * slot
        for ring in (twin.state.ring_value, twin.state.ring_key):
            ring[slot, :, row] = (ring[slot, :, row].float() * 2).round().to(ring.dtype)
        twin.state.ring_decay[slot, :, row] = 0.25
    twin.step([2, 0, 1], [8, 8, 8], tokens=8)
    assert all(different == 0 for different, _ in twin.different.values())


@pytest.mark.parametrize(("recurrence", "read"), CASES)
def test_three_windows_of_plain_decoding(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None
) -> None:
    twin = NarrowTwin(library, shape(64, heads=8), config(recurrence, read, window=4), "bfloat16", slots=3)
    for slot in range(3):
        twin.admit(slot, h=slot, origin=slot)
    for _ in range(13):
        twin.step([1, -1, 2, 0], [1, 1, 1, 1], tokens=1)
        for slot in range(3):
            if twin.flushes(slot, 1):
                twin.cursors.origin[slot] = (twin.cursors.origin[slot] + twin.cursors.h[slot]) % twin.config.ring_rows
                twin.cursors.h[slot] = 0
            twin.cursors.h[slot] += 1
            twin.cursors.position[slot] += 1
    twin.check_neighbours()


@pytest.mark.parametrize(("recurrence", "read"), [CASES[1], CASES[2], CASES[3], CASES[7]])
def test_extreme_states_survive_a_flush(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None
) -> None:
    """Zero heads, states at the ends of float32's range, one enormous element among tiny ones, numbers about float16's
    smallest normal one, exact ties of E2M1.
    """
    import torch

    twin = NarrowTwin(library, shape(64, heads=8), config(recurrence, read, 8, 8), "bfloat16", slots=1)
    twin.a[:] = 0.0
    state = torch.zeros(8, 64, 128)
    state[1] = 1e-38
    state[2] = twin.normal(64, 128) * 1e-30
    state[3] = twin.normal(64, 128)
    state[3, 5, 7] = 1e30 if recurrence is FP32 else 6e4
    state[4] = -0.0
    state[5] = twin.normal(64, 128) * 2.0**-15
    state[6] = torch.arange(64 * 128).reshape(64, 128) % 49 / 4 - 6
    state[6, :, ::16] = 6.0  # scales of one
    state[6, 0, 0] = 2688.0
    twin.admit(0, h=1, origin=0, state=state)
    twin.state.ring_decay[0, :, 0] = 0.0
    rows = twin.inputs([0], [8], 8)
    rows["q"][:] = 0.0
    twin.step([0], [8], 8, rows)
    assert all(different == 0 for different, _ in twin.different.values())


def test_wrong_copies_are_named(library: _abi.Library) -> None:
    twin = NarrowTwin(library, shape(64, heads=8), config(FP16, FP4), "bfloat16", slots=2)
    twin.admit(0, h=0, origin=0)
    rows = twin.inputs([0], [1], 1)
    device = {n: t.cuda() for n, t in state_tensors(twin.state).items()}
    with pytest.raises(ContractError, match="read_head_scale"):
        twin.launch({**device, "read_head_scale": device["read_head_scale"].half()}, rows, [0], [1])
    with pytest.raises(ContractError, match="read_scale"):
        twin.launch({**device, "read_scale": device["read_scale"][:, :, :, :4]}, rows, [0], [1])
    with pytest.raises(UnsupportedError, match="built are"):
        narrow = NarrowTwin(library, shape(16, heads=8), config(FP16, FP4), "bfloat16", slots=1)
        narrow.admit(0, h=0, origin=0)
        narrow.launch(
            {n: t.cuda() for n, t in state_tensors(narrow.state).items()}, narrow.inputs([0], [1], 1), [0], [1]
        )
    assert np.isfinite(rows["dt"].numpy()).all()
