"""Whole models with a drafting head and n > 1: a fork goes on from all of its parent's state, its hidden states too."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.prefix.torch_engines import WITH_HEAD, TorchBench, prompt
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.spec.philox import choice_seed

PROMPT = prompt(WITH_HEAD, 11)
GREEDY: dict[str, Any] = {"max_tokens": 8, "end_id": -1}
SEEDED: dict[str, Any] = {**GREEDY, "temperature": 0.9, "seed": 11}


@cache
def alone(kind: str, index: int | None) -> tuple[list[int], int, int]:
    """Tokens of one choice by itself, drafted and accepted tokens. index: of the seeded choice; None: greedy."""
    bench = TorchBench(WITH_HEAD, kind, chunk=8)
    settings = GREEDY if index is None else {**SEEDED, "seed": choice_seed(11, index)}
    tokens = bench.one(PROMPT, **settings).token_ids
    return tokens, bench.engine.stats.drafted_tokens, bench.engine.stats.accepted_tokens


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", ["mtp", "mtp-sampled"])
def test_both_choices_draft_and_answer_as_each_would_alone(kind: str, seeded: bool) -> None:
    bench = TorchBench(WITH_HEAD, kind, chunk=8)
    number = bench.add(PROMPT, n=2, **(SEEDED if seeded else GREEDY))
    outputs = bench.run()[number].outputs
    single = [alone(kind, index if seeded else None) for index in range(2)]
    assert [output.token_ids for output in outputs] == [tokens for tokens, _, _ in single]
    assert (outputs[0].token_ids != outputs[1].token_ids) is seeded
    # Wrong hidden states would give other drafts, of which other numbers are accepted.
    assert bench.engine.stats.drafted_tokens == sum(drafted for _, drafted, _ in single) > 0
    assert bench.engine.stats.accepted_tokens == sum(accepted for _, _, accepted in single)
    assert bench.session.free_slots == bench.session.pool.slots


def test_a_fork_drafts_what_its_parent_drafts() -> None:
    """Bit for bit: the head reads the hidden states of the prompt's last chunk, which the fork has not run itself."""
    from trtllm_replayssm.runtime.session.base import MtpRow, PrefillChunk

    session: TorchSession = TorchBench(WITH_HEAD, "mtp").session
    slot = session.allocate(1)
    session.prefill([PrefillChunk(slot, PROMPT, True)])
    copy = session.fork(slot, 2)
    followers = [*PROMPT[1:], 9]
    ours = session.mtp_begin([MtpRow(slot, followers)])[0]
    theirs = session.mtp_begin([MtpRow(copy, followers)])[0]
    assert (ours == theirs).all() and ours.std() > 0
