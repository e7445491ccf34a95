"""What outlives a pass has memory of its own: a view would keep the tensor of all the pass's rows alive."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.paths import EXAMPLES
from tests.session.sessions import open_session
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.native_prompts import NativePrompts
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

LENGTHS = (9, 5, 13, 7)  # tokens of the chunks of one pass; the second and the last are of prompts that go on
GO_ON = (1, 3)


class Kernel:
    """Stands for NativePrefill: every row that has a carry leaves another one; outputs mean nothing."""

    def scan(
        self, state: Any, cursors: Any, rows: StepRows, tokens: dict[str, torch.Tensor], row_flags: torch.Tensor,
        carry: torch.Tensor | None, carry_index: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        if carry is not None:
            carry.fill_(1.0)
        return torch.zeros_like(tokens["value"])


def open_small(name: str, *, conventional: bool) -> TorchSession:
    """A session of a small checkpoint, "drafting": of the bundled one with a drafting head."""
    if name != "drafting":
        return open_session(name, conventional=conventional)
    checkpoint, replay = Checkpoint.open(EXAMPLES / "qwen3_5-tiny-nvfp4"), ReplayConfig(window=8, max_step_tokens=4)
    return TorchSession.from_checkpoint(
        checkpoint, replay, PoolConfig(slots=4, max_seq_len=64), debug=True,
        state_cache="conventional" if conventional else "replay",
    )  # fmt: skip


def alive() -> list[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]


def larger_than_they_say(known: list[torch.Tensor]) -> list[tuple[list[int], int]]:
    """(sizes, bytes of the memory behind them) of tensors that are alive and not known, where there is more of it."""
    before = {id(tensor) for tensor in known}
    new = [tensor for tensor in alive() if id(tensor) not in before]
    return [(list(t.shape), t.untyped_storage().nbytes()) for t in new if t.untyped_storage().nbytes() > t.nbytes]


def traffic(session: TorchSession, check: Callable[[], None]) -> None:
    """Four prompts in one pass, the unfinished ones' ends in another, drafts, a fork, a step; check after each."""
    slots = [session.allocate(seed) for seed in range(len(LENGTHS) - 1)]
    slots.append(session.restore(session.save(slots[0])))
    prompts = [list(range(3, 3 + length)) for length in LENGTHS]
    session.prefill([
        PrefillChunk(slot, prompt, place not in GO_ON)
        for place, (slot, prompt) in enumerate(zip(slots, prompts, strict=True))
    ])  # fmt: skip
    assert set(session.pools.carries) == {slots[place] for place in GO_ON}
    check()
    if session._head.present:
        session.mtp_begin([MtpRow(slot, prompt) for slot, prompt in zip(slots, prompts, strict=True)])
        session.mtp_next([5] * len(slots))
        check()
    session.prefill([PrefillChunk(slots[GO_ON[0]], [4, 5], False), PrefillChunk(slots[GO_ON[1]], [4, 5, 6], True)])
    check()
    session.prefill([PrefillChunk(slots[GO_ON[0]], [6], True)])
    session.free(slots[0])
    slots[0] = session.fork(slots[2], 8)
    check()
    session.decode([DecodeRow(slot, [5, 6]) for slot in slots])
    session.commit([1, 2, 0, 2])
    check()
    for slot in slots:
        session.free(slot)
    assert session.pools.carries == {}


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("native", [False, True], ids=["reference", "native"])
@pytest.mark.parametrize("name", ["nemotron-dense", "qwen-dense", "drafting"])
def test_tensors_that_outlive_a_pass_are_no_views_of_its_tensors(
    name: str, native: bool, conventional: bool
) -> None:
    session = open_small(name, conventional=conventional)
    if native:
        session._state_ops._prompts = NativePrompts(session.pools, Kernel())  # type: ignore[arg-type]
    traffic(session, lambda: None)  # weights are read when first used
    known, found = alive(), []
    traffic(session, lambda: found.append(larger_than_they_say(known)))
    assert found == [[]] * len(found)
