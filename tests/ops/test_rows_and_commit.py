"""Row checks, cursor moves and the flush rule against the specification's cursors (A09, A12, A16, A21, A23, A27)."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import CPU, KINDS, Layer, random_tokens
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops.layer_state import CursorTensors
from trtllm_replayssm.ops.reference import commit
from trtllm_replayssm.ops.reference.rows import step_rows
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec import cursors as spec


def test_every_window_step_and_acceptance_moves_the_cursors_as_specified() -> None:
    """A09, A12: all h, n and a (also a = -1 and n + 1, A16) for small windows; one token at least is a base token."""
    for window, widest in [(1, 1), (2, 2), (3, 3), (8, 6), (5, 4)]:
        config = ReplayConfig(window=window, max_step_tokens=widest)
        for h, n, origin in itertools.product(range(window + 1), range(widest + 1), (0, config.ring_rows - 1)):
            cursors = CursorTensors.allocate(widest + 3, CPU)
            cursors.h[:], cursors.origin[:], cursors.position[:] = h, origin, 50
            slots = torch.arange(widest + 3)
            accepted = slots - 1
            rows = step_rows("test", slots, torch.full_like(slots, n), widest + 3, widest)
            commit.commit(config, cursors, rows, accepted)
            for slot, a in zip(slots.tolist(), accepted.tolist(), strict=True):
                want = spec.Cursors(origin, h, 50)
                spec.commit(config, want, n, a)
                got = (int(cursors.origin[slot]), int(cursors.h[slot]), int(cursors.position[slot]))
                assert got == (want.origin, want.h, want.position)
                assert got[1] <= window


def test_a16_a_negative_or_large_acceptance_is_clamped_to_the_row() -> None:
    """A16: stale counts of padded rows, all drafts refused, more accepted than there are."""
    cursors = CursorTensors.allocate(4, CPU)
    rows = step_rows("test", torch.tensor([2, -1, 0, 3]), torch.tensor([3, 3, 0, 2]), 4, 3)
    commit.commit(ReplayConfig(window=8, max_step_tokens=3), cursors, rows, torch.tensor([99, 99, 99, -1]))
    assert cursors.position.tolist() == [0, 0, 3, 0] and cursors.h.tolist() == [0, 0, 3, 0]
    commit.commit_conventional(ReplayConfig(window=8, max_step_tokens=3), cursors, rows, torch.tensor([1, 5, 5, 7]))
    assert cursors.position.tolist() == [0, 0, 4, 2] and cursors.origin.tolist() == [0, 0, 1, 2]


def test_a_prompt_chunk_resets_the_ring_of_its_rows_only() -> None:
    cursors = CursorTensors.allocate(3, CPU)
    cursors.h[:], cursors.origin[:], cursors.position[:] = 2, 4, 9
    commit.finish_chunk(cursors, torch.tensor([1]), torch.tensor([7]))
    assert cursors.h.tolist() == [2, 0, 2] and cursors.origin.tolist() == [4, 0, 4]
    assert cursors.position.tolist() == [9, 16, 9] and cursors.position.dtype is torch.int32


@pytest.mark.parametrize("kind", KINDS)
def test_a21_slots_may_be_any_integer_type_and_any_stride(kind: SsmKind) -> None:
    """A21: a column of a [B, 1 + T] table, int32, as a scheduler may hold it."""
    table = torch.full((3, 5), -7, dtype=torch.int32)
    table[:, 0], table[:, 1] = torch.tensor([2, -1, 0]), torch.tensor([2, 2, 1])
    rows = step_rows("test", table[:, 0], table[:, 1], 3, 2)
    plain = step_rows("test", torch.tensor([2, -1, 0]), torch.tensor([2, 2, 1]), 3, 2)
    assert torch.equal(rows.active_slot, plain.active_slot) and rows.active.tolist() == [0, 2]
    assert torch.equal(rows.active_num_tokens, plain.active_num_tokens)
    layer, other = (Layer(ssm_shape(kind), ReplayConfig(window=4, max_step_tokens=2), 3) for _ in range(2))
    tokens = random_tokens(layer.shape, 3, 2)
    assert torch.equal(layer.step(tokens, table[:, 0], table[:, 1]), other.step(tokens, [2, -1, 0], [2, 2, 1]))  # type: ignore[arg-type]


BAD = [
    ([0, 0], [1, 1], "at most once"),
    ([3, 0], [1, 1], r"-1 \(padding\) or 0\.\.2"),
    ([-2, 0], [1, 1], r"-1 \(padding\) or 0\.\.2"),
    ([2**31 - 1, 0], [1, 1], r"-1 \(padding\) or 0\.\.2"),
    ([0, 1], [1, 3], r"0\.\.2"),
    ([0, 1], [-1, 1], r"0\.\.2"),
    ([0, 1], [1], r"two vectors"),
]


@pytest.mark.parametrize("slots,counts,message", BAD)
def test_a27_wrong_rows_are_refused_by_name(slots: list[int], counts: list[int], message: str) -> None:
    """A27: also a ragged batch with one row longer than the step."""
    with pytest.raises(ContractError, match=message):
        step_rows("test", torch.tensor(slots), torch.tensor(counts), 3, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conventional", [False, True])
def test_a23_a_step_wider_than_the_pool_is_refused_before_it_writes(kind: SsmKind, conventional: bool) -> None:
    """A23: every T up to T_max is right (see the boundary grid); T_max + 1 changes nothing."""
    layer = Layer(ssm_shape(kind), ReplayConfig(window=9, max_step_tokens=4), conventional=conventional)
    before = layer.everything(0)
    layer.poisoned = False
    with pytest.raises(ContractError, match="T_max = 4"):
        layer.update(random_tokens(layer.shape, 1, 5), [0], [5])
    assert all(torch.equal(a, b) for a, b in zip(before, layer.everything(0), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batches_and_steps_are_legal(kind: SsmKind) -> None:
    layer = Layer(ssm_shape(kind), ReplayConfig(window=4, max_step_tokens=2))
    assert layer.step(random_tokens(layer.shape, 0, 2), []).shape == (0, 2, 4, 16)
    assert layer.step(random_tokens(layer.shape, 1, 0), [0]).shape == (1, 0, 4, 16)
    assert layer.cursor(0) == (0, 0, 0)
