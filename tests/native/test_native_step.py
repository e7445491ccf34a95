"""The step's own kernels leave the registers, reports and inputs that the torch operations leave."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.device.requests import entry
from tests.native import harness
from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.runtime.device.entry import SamplingMode
from trtllm_replayssm.runtime.device.native_step import NativeStep
from trtllm_replayssm.runtime.device.ports import Committed
from trtllm_replayssm.runtime.device.prompt_lookup import PromptLookup
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.device.step import DeviceStep
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

SLOTS, VOCAB, POSITIONS = 9, 12, 200
SETTINGS: list[dict[str, Any]] = [{}, {}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}, {"top_k": 1}]


class Port:
    """Logits as they are told; notes what is committed."""

    def __init__(self, batch: int, width: int) -> None:
        self.ids = torch.zeros((batch, width), dtype=torch.int64, device="cuda")
        self.slot = torch.full((batch,), -1, dtype=torch.int32, device="cuda")
        self.num_tokens = torch.zeros(batch, dtype=torch.int32, device="cuda")
        self.logits = torch.zeros((batch, width, VOCAB), device="cuda")
        self.committed = torch.zeros(0)

    def forward(self) -> ModelOutput[Tensor]:
        return ModelOutput(self.logits, self.logits)

    def commit(self, accepted: Tensor) -> None:
        self.committed = accepted.long().clone()

    def draft(self, *_: Tensor) -> Any:
        raise AssertionError("this drafter has no head")


def state(kind: type[DeviceStep], batch: int, width: int) -> tuple[DeviceStep, Registers, Port]:
    native = kind is NativeStep
    drafter = PromptLookup(width - 1, 3, POSITIONS, native=native) if width > 1 else None
    made = Registers.allocate(SLOTS, width - 1, POSITIONS if width > 1 else 0, torch.device("cuda"))
    made.enter([
        entry(
            i, SamplingParams(**SETTINGS[i % len(SETTINGS)]), seed=i << 40, tokens=[1, 2, 1, 2 + i % 3], room=3 + 4 * i,
            stop_ids=[7, 9] if i % 4 == 3 else [],
        )
        for i in range(SLOTS)
    ])  # fmt: skip
    port = Port(batch, width)
    return kind(port, made, drafter, SamplingMode.FILTERED), made, port


@pytest.mark.parametrize("width", [1, 4])
def test_registers_reports_and_commits_are_those_of_the_torch_operations(width: int) -> None:
    """40 steps of rows in changing order with padding, ends, rejections and a row that breaks."""
    batch, rng = 7, np.random.default_rng(width)
    pair = [state(kind, batch, width) for kind in (DeviceStep, NativeStep)]
    emitted = 0
    for step in range(40):
        slots = rng.permutation(SLOTS)[:batch].astype(np.int32)
        slots[rng.random(batch) < 0.2] = -1
        logits = torch.from_numpy(rng.standard_normal((batch, width, VOCAB)).astype(np.float32) * 2).cuda()
        if step == 30:
            logits[2, 0, 5] = float("nan")
        for device_step, _, port in pair:
            port.slot.copy_(torch.from_numpy(slots))
            port.logits.copy_(logits)
            device_step.run()
        (torch_step, expected, want), (native, got, port) = pair
        exists = torch.arange(width, device="cuda") < want.num_tokens[:, None]
        assert (port.num_tokens == want.num_tokens).all() and (port.committed == want.committed).all()
        assert (port.ids == want.ids)[exists].all()
        shown = torch.arange(width, device="cuda") < want.committed[:, None]
        assert (native.report[:, width:] == torch_step.report[:, width:]).all()
        assert (native.report[:, :width] == torch_step.report[:, :width])[shown].all()
        for field in fields(Registers):
            ours, theirs = getattr(got, field.name)[:SLOTS], getattr(expected, field.name)[:SLOTS]
            if field.name == "history":  # what lies behind the text means nothing
                inside = torch.arange(ours.shape[1], device="cuda") < expected.length[:SLOTS, None]
                ours, theirs = ours[inside], theirs[inside]
            if field.name == "draft":  # so does what lies behind the drafts
                inside = torch.arange(width - 1, device="cuda") < expected.draft_count[:SLOTS, None]
                ours, theirs = ours[inside], theirs[inside]
            if field.name != "draft_weights":
                assert torch.equal(ours, theirs), (step, field.name)
        emitted += int(want.committed.sum())
    assert emitted > 60 and (got.room[:SLOTS] == 0).sum() >= 5


def test_slots_out_of_range_are_padding() -> None:
    device_step, made, port = state(NativeStep, 3, 1)
    before = made.length.clone()
    port.slot.copy_(torch.tensor([SLOTS, 1 << 30, -7]))
    device_step.run()
    assert port.num_tokens.tolist() == [0, 0, 0] and torch.equal(made.length, before)
    assert device_step.report[:, 1:].tolist() == [[0, 0, 0]] * 3


@pytest.mark.parametrize("positions", [5, 300, 2000])
def test_prompt_lookup_drafts_what_the_host_drafts(positions: int) -> None:
    """200 random texts of few distinct tokens: n-grams of up to four, drafts as far as there is room."""
    rng, rows, count = np.random.default_rng(positions), 200, 5
    texts = [rng.integers(0, int(rng.integers(2, 40)), rng.integers(1, positions + 1)).tolist() for _ in range(rows)]
    rooms = rng.integers(0, 9, rows)
    made = Registers.allocate(rows, count, positions, torch.device("cuda"))
    made.enter([
        entry(i, SamplingParams(), tokens=text, room=int(room))
        for i, (text, room) in enumerate(zip(texts, rooms, strict=True))
    ])  # fmt: skip
    port = Port(1, 1)
    drafter = PromptLookup(count, 4, positions, native=True)
    done = Committed(port.ids, port.ids, port.ids, SamplingMode.GREEDY)
    drafter.propose(made, torch.arange(rows, device="cuda"), port, done)
    found = 0
    for i, (text, room) in enumerate(zip(texts, rooms, strict=True)):
        most = min(max(int(room) - 1, 0), count)
        want = NGramDrafter(count, 4)._lookup(text, most).tokens if most else ()
        got = made.draft[i, : made.draft_count[i]].tolist()
        assert tuple(got) == want, (i, text)
        found += len(got)
    assert found > 50
