"""The native update of the gated delta rule with narrow states against the reference operations."""

from __future__ import annotations

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.narrow import CASES, NarrowTwin, config
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.launches import UpdateKernel, UpdateLaunch
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind, SsmShape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]


def shape(heads: int = 4, groups: int = 2) -> SsmShape:
    return ssm_shape(SsmKind.GDN, heads=heads, groups=groups, head_dim=128, state_dim=128)


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize(("recurrence", "read"), CASES)
def test_plain_steps_match_the_reference_at_every_fill(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None, act: str, heads: int
) -> None:
    twin = NarrowTwin(library, shape(heads), config(recurrence, read), act, slots=7)
    for slot, (h, origin) in enumerate([(0, 0), (1, 16), (7, 3), (8, 12), (15, 9), (16, 0), (16, 5)]):
        twin.admit(slot, h, origin)
    twin.step([3, 5, -1, 0, 6, 2, 1, 4], [1, 1, 1, 1, 1, 0, 1, 1], tokens=1)
    twin.check_neighbours()


PARTS = [(8, 4, 4, 2), (8, 4, 8, 2), (16, 8, 16, 2), (16, 4, 8, 2), (24, 2, 8, 2)]


@pytest.mark.parametrize(("heads", "groups", "part", "stages"), PARTS)
@pytest.mark.parametrize(("recurrence", "read"), CASES)
def test_a_part_of_several_groups_or_of_a_piece_of_one_matches_the_reference(
    library: _abi.Library,
    recurrence: StateFormat,
    read: StateFormat | None,
    heads: int,
    groups: int,
    part: int,
    stages: int,
) -> None:
    """As large batches are launched: a warp a group, or several; parts of two, four and eight groups."""
    asked = UpdateLaunch(kernel=UpdateKernel.PARTS, piece_heads=part, stages=stages)
    twin = NarrowTwin(library, shape(heads, groups), config(recurrence, read), "bfloat16", slots=6, asked=asked)
    for slot, (h, origin) in enumerate([(0, 4), (1, 16), (8, 3), (15, 12), (16, 9), (16, 0)]):
        twin.admit(slot, h, origin)
    twin.step([3, 5, -1, 0, 2, 1, 4], [1, 1, 1, 1, 1, 0, 1], tokens=1)
    twin.check_neighbours()


@pytest.mark.parametrize("window", [4, 16, 40])
@pytest.mark.parametrize("tokens", [2, 3, 4])
@pytest.mark.parametrize(("recurrence", "read"), [CASES[2], CASES[3], CASES[6]])
def test_verification_matches_the_reference_in_any_window(
    library: _abi.Library, recurrence: StateFormat, read: StateFormat | None, tokens: int, window: int
) -> None:
    """Flushes of one block of records and of several."""
    twin = NarrowTwin(library, shape(), config(recurrence, read, window, tokens), "bfloat16", slots=6)
    fills = [0, window // 2, max(window - tokens, 0), window - tokens + 1, window, min(17, window)]
    for slot, h in enumerate(fills):
        twin.admit(slot, h, origin=(slot * 7) % twin.config.ring_rows)
    twin.step([5, -1, 3, 4, 0, 2, 1], [tokens, tokens, tokens, max(tokens - 1, 1), tokens, tokens, 1], tokens)
    twin.check_neighbours()
