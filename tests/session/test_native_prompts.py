"""Where the kernels take a prompt chunk's state from and leave it, row by row; the kernel itself is a recorder here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.session.sessions import open_session
from trtllm_replayssm.ops._abi import PrefillFlag
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.runtime.session.native_prompts import NativePrompts
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext

ZERO, FROM, TO = PrefillFlag.FROM_ZERO, PrefillFlag.FROM_CARRY, PrefillFlag.TO_CARRY


class Recorder:
    """Stands for NativePrefill: keeps what it is given and adds each row's number to its carry.

    before: by row, the first value of the carry that it is given.
    """

    def __init__(self) -> None:
        self.flags: list[int] = []
        self.before: dict[int, float] = {}
        self.slots: list[int] = []
        self.carries = 0

    def scan(
        self, state: Any, cursors: Any, rows: StepRows, tokens: Any, row_flags: Any, carry: Any, carry_index: Any
    ) -> torch.Tensor:
        self.flags, self.slots = row_flags.tolist(), rows.slot.tolist()
        assert max(self.slots) < len(state.ring_key) == len(cursors.origin)
        assert (carry is None) == (carry_index is None)
        self.carries, self.before = 0 if carry is None else len(carry), {}
        for row, flags in enumerate(self.flags):
            if flags & int(FROM | TO):
                place = int(carry_index[row])
                if flags & int(FROM):
                    self.before[row] = float(carry[place, 0, 0, 0])
                carry[place] += row + 1
        return tokens["value"]


def chunk(slots: list[int], counts: list[int], starts: list[int], last: list[bool]) -> StepContext:
    slot, count = torch.tensor(slots), torch.tensor(counts)
    rows = StepRows(slot, count)
    return StepContext(Phase.PREFILL, rows, torch.tensor(starts), max(counts), torch.tensor(last))


@pytest.fixture
def pools() -> Any:
    return open_session("nemotron-dense").pools


def test_rows_start_from_nothing_a_checkpoint_or_a_carry_and_leave_a_carry_until_the_prompt_ends(pools: Any) -> None:
    recorder = Recorder()
    prompts = NativePrompts(pools, recorder)  # type: ignore[arg-type]
    layer, tokens = next(iter(pools.ssm)), {"value": torch.zeros(5, 3, 4, 16)}
    pools.carries = {2: {layer: torch.full((4, 16, 32), 10.0)}}
    prompts.scan(
        chunk([0, 1, 2, -1, 3], [3, 2, 3, 3, 3], [0, 7, 5, 0, 0], [True, True, False, True, False]), layer, tokens
    )
    assert recorder.flags == [int(ZERO), 0, int(FROM | TO), 0, int(ZERO | TO)]
    assert recorder.before == {2: 10.0} and recorder.carries == 2, "rows without a carry take no room"
    assert {slot: float(states[layer][0, 0, 0]) for slot, states in pools.carries.items()}[2] == 13.0
    assert set(pools.carries) == {2, 3} and pools.carries[3][layer].shape == (4, 16, 32)


def test_chunks_without_a_carry_give_the_kernel_none(pools: Any) -> None:
    recorder = Recorder()
    layer = next(iter(pools.ssm))
    NativePrompts(pools, recorder).scan(  # type: ignore[arg-type]
        chunk([0, 1], [2, 0], [0, 9], [True, False]), layer, {"value": torch.zeros(2, 2, 4, 16)}
    )
    assert recorder.flags == [int(ZERO), 0] and recorder.carries == 0 and pools.carries == {}


def test_rows_of_conventional_states_go_from_a_carry_to_a_carry_and_into_the_state_when_the_prompt_ends() -> None:
    """Fresh and last, after 7 tokens and last, between chunks, padding, fresh and not last."""
    pools, recorder = open_session("nemotron-dense", conventional=True).pools, Recorder()
    layer, tokens = next(iter(pools.ssm)), {"value": torch.zeros(5, 3, 4, 16)}
    states = pools.ssm[layer].states  # type: ignore[union-attr]
    states.zero_()
    states[1, 2], pools.cursors.origin[1] = 20.0, 2
    pools.carries = {2: {layer: torch.full((4, 16, 32), 10.0)}}
    NativePrompts(pools, recorder).scan(  # type: ignore[arg-type]
        chunk([0, 1, 2, -1, 3], [3, 2, 3, 3, 3], [0, 7, 5, 0, 0], [True, True, False, True, False]), layer, tokens
    )
    assert recorder.flags == [int(ZERO | TO), int(FROM | TO), int(FROM | TO), 0, int(ZERO | TO)]
    assert recorder.slots == [0, 0, 0, -1, 0], "one slot stands for all"
    assert recorder.before == {1: 20.0, 2: 10.0} and recorder.carries == 4
    assert (states[1, 0] == 22.0).all() and (states[1, 2] == 20.0).all(), "finish_chunk makes entry 0 the current one"
    assert set(pools.carries) == {2, 3} and (pools.carries[2][layer] == 13.0).all()
