"""The device's prompt lookup drafts what the host's does, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.device.requests import entry, on_devices
from trtllm_replayssm.runtime.device.prompt_lookup import PromptLookup, lookup
from trtllm_replayssm.runtime.device.registers import Registers
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.speculative.ngram import NGramDrafter

WIDTH = 40  # of the history; what lies behind a text is whatever was there


def host_drafts(tokens: list[int], max_ngram: int, count: int) -> tuple[int, ...]:
    return NGramDrafter(count, max_ngram)._lookup(tokens, count).tokens


def device_drafts(texts: list[list[int]], max_ngram: int, count: int, device: str = "cpu") -> list[tuple[int, ...]]:
    rng = np.random.default_rng(len(texts))
    history = torch.from_numpy(rng.integers(0, 3, (len(texts), WIDTH)))
    for i, text in enumerate(texts):
        history[i, : len(text)] = torch.tensor(text)
    length = torch.tensor([len(t) for t in texts])
    drafts, found = lookup(history.to(device), length.to(device), max_ngram, count)
    return [tuple(row) if any_ else () for row, any_ in zip(drafts.tolist(), found.tolist(), strict=True)]


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 5), st.integers(1, 6))
def test_drafts_are_those_of_the_host(batch: list[list[int]], max_ngram: int, count: int) -> None:
    assert device_drafts(batch, max_ngram, count) == [host_drafts(text, max_ngram, count) for text in batch]


@on_devices
@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([7], ()),  # nothing before it
        ([7, 7], (7, 7, 7)),  # a loop of one token copies itself
        ([1, 2, 1, 2], (1, 2, 1)),
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], (9, 2, 3)),  # the longest suffix, not the latest match
        ([2, 3, 9, 2, 3, 8, 2, 3], (8, 2, 3)),  # of equals the latest
    ],
)
def test_hand_cases(text: list[int], drafts: tuple[int, ...], device: str) -> None:
    assert device_drafts([text], 3, 3, device) == [drafts] == [host_drafts(text, 3, 3)]


@pytest.mark.timeout(20)
def test_suffixes_longer_than_a_slot_are_not_tried() -> None:
    made = Registers.allocate(1, 3, WIDTH, torch.device("cpu"))
    made.enter([entry(0, SamplingParams(), tokens=[1, 2, 1, 2])])
    PromptLookup(3, 1 << 40, WIDTH).propose(made, torch.tensor([0]), None, None)  # type: ignore[arg-type]  # not read
    assert made.draft[0].tolist() == [1, 2, 1] and made.draft_count.tolist() == [3, 0]
