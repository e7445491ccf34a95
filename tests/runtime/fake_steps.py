"""Static steps over the fake session, for the device loop: its model, its protocol checks, its cursors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.runtime.fake_session import FakeSession
from trtllm_replayssm.graph import ModelOutput
from trtllm_replayssm.runtime.device.head_drafts import HeadDrafts
from trtllm_replayssm.runtime.device.ports import DraftPort
from trtllm_replayssm.runtime.device.prompt_lookup import PromptLookup
from trtllm_replayssm.runtime.device.steps import DeviceSteps
from trtllm_replayssm.runtime.session.base import DecodeRow, MtpRow
from trtllm_replayssm.runtime.session.capture import GraphPool

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Drafted:
    logits: Tensor
    hidden: Tensor


class FakeStep:
    """What does not exist is NaN, or an id far outside the vocabulary: nobody may read it."""

    def __init__(self, session: FakeSession, batch: int, width: int) -> None:
        self._session = session
        self.ids = torch.zeros((batch, width), dtype=torch.int64)
        self.slot = torch.full((batch,), -1, dtype=torch.int32)
        self.num_tokens = torch.zeros(batch, dtype=torch.int32)
        self._live: list[int] = []

    def forward(self) -> ModelOutput[Tensor]:
        counts = self.num_tokens.tolist()
        self._live = [i for i, (slot, n) in enumerate(zip(self.slot.tolist(), counts, strict=True)) if slot >= 0 < n]
        rows = [DecodeRow(int(self.slot[i]), self.ids[i, : counts[i]].tolist()) for i in self._live]
        logits = torch.full((*self.ids.shape, self._session.geometry.vocab), float("nan"))
        for i, found in zip(self._live, self._session.decode(rows) if rows else [], strict=True):
            logits[i, : counts[i]] = torch.from_numpy(found)
        return ModelOutput(torch.zeros((*self.ids.shape, 1)), logits)

    def commit(self, accepted: Tensor) -> None:
        if self._live:
            self._session.commit([int(accepted[i]) for i in self._live])

    def draft(self, num_tokens: Tensor, start: Tensor, next_ids: Tensor, hidden: Tensor) -> Drafted:
        """The first call of a step has T tokens a row, the ones after it have one."""
        logits = torch.full((len(next_ids), self._session.geometry.vocab), float("nan"))
        rows = [i for i, n in enumerate(num_tokens.tolist()) if n > 0]
        slots = [self._session.live[int(self.slot[i])] for i in rows]
        if next_ids.shape[1] > 1:
            assert [slot.position - slot.hidden for slot in slots] == [int(start[i]) for i in rows]
            pairs = [MtpRow(int(self.slot[i]), next_ids[i, : num_tokens[i]].tolist()) for i in rows]
            found = self._session.mtp_begin(pairs) if pairs else []
        else:
            assert [len(slot.head) for slot in slots] == [int(start[i]) for i in rows]
            self._session._drafting = [int(self.slot[i]) for i in rows]
            found = self._session.mtp_next([int(next_ids[i, 0]) for i in rows])
        for i, row in zip(rows, found, strict=True):
            logits[i] = torch.from_numpy(row)
        return Drafted(logits, hidden[:, :1])


def device_steps(session: FakeSession, kind: str, draft_len: int) -> DeviceSteps:
    drafters: dict[str, DraftPort | None] = {
        "plain": None,
        "ngram": PromptLookup(draft_len, 3, session.pool.max_seq_len),
        "mtp": HeadDrafts(draft_len),
        "mtp-sampled": HeadDrafts(draft_len, draws=True),
    }
    return DeviceSteps(
        lambda batch, width: FakeStep(session, batch, width), GraphPool(CPU), drafters[kind],
        slots=session.pool.slots, buckets=(1, 2, 4, 64), recorded=(), device=CPU, vocab=session.geometry.vocab,
    )  # fmt: skip
