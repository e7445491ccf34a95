"""Ranks that live and do not go on: the one that did not arrive is named, in a collective and behind the last one."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.parallel.rank_failures import assert_named_and_ended
from tests.runtime.fake_session import FakeSession, hash_model
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.runtime.session.rank_marks import MarkedRanks, RankMarks
from trtllm_replayssm.runtime.session.rank_process import start_ranks
from trtllm_replayssm.runtime.session.ranks import Ranks
from trtllm_replayssm.runtime.session.shared_session import SharedSession

pytestmark = pytest.mark.timeout(240)
HANGS = 120.0  # seconds: far longer than a test may take
LIMIT = 2.0
MEETINGS = 8


class Sleeping(FakeSession):
    """`check_integrity` meets the other ranks MEETINGS times, `seconds` apart; the rank `who` sleeps before the one
    numbered `when`, MEETINGS: before it answers.
    """

    def __init__(self, ranks: Ranks, who: int, when: int, seconds: float = 0.0) -> None:
        super().__init__(hash_model(24), slots=2)
        self._ranks, self._who, self._when, self._seconds = ranks, who, when, seconds

    def check_integrity(self) -> None:
        for meeting in range(1 + MEETINGS):
            if (self._ranks.parallel.rank, meeting) == (self._who, self._when):
                time.sleep(HANGS if self._who else 3 * LIMIT)  # nobody can end the first
            if meeting < MEETINGS:
                time.sleep(self._seconds)
                self._ranks.add_up(torch.ones(2))


def make(ranks: Ranks, *, who: int, when: int = 0, seconds: float = 0.0) -> Session:
    return Sleeping(ranks, who, when, seconds)


def shared_session(size: int, limit: float = LIMIT, **hang: float) -> SharedSession:
    own, others = start_ranks(size, partial(make, **hang), backend="gloo")
    return SharedSession(
        own, others.connections, own.geometry, others.hang_up, others.give_up, marks=others.marks, limit=limit
    )


@pytest.mark.parametrize(("who", "when"), [(1, 0), (2, 1), (1, MEETINGS), (2, MEETINGS), (0, 2)])
def test_a_rank_that_does_not_arrive_is_named_and_the_others_are_ended(who: int, when: int) -> None:
    """Before the first, a middle and no further meeting; also where it is the one that watches."""
    shared = shared_session(3, who=who, when=when)
    assert_named_and_ended(shared, rf"rank {who}:.*no progress for 2 s.*restart the replica", HANGS / 4)
    assert not distributed.is_initialized()


def test_a_call_may_take_longer_than_the_limit_while_ranks_go_on() -> None:
    """In a process where ranks have hung before."""
    shared = shared_session(2, who=-1, seconds=0.3 * LIMIT)
    try:
        began = time.monotonic()
        shared.check_integrity()
        assert time.monotonic() - began > 2 * LIMIT
    finally:
        shared.close()


def test_a_rank_that_hangs_while_it_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtllm_replayssm.runtime.session.rank_process.START_SECONDS", 5.0)
    with pytest.raises(ConfigError, match=r"\(rank 2\).*no progress for 5 s"):
        start_ranks(3, make_met, backend="gloo")
    assert not distributed.is_initialized()


def make_met(ranks: Ranks) -> Session:
    """Ranks meet once while they start, the last one late."""
    if ranks.parallel.rank == 2:
        time.sleep(HANGS)
    ranks.add_up(torch.ones(2))
    return FakeSession(hash_model(24), slots=2)


class Alone:
    """Collectives of one rank."""

    parallel = None

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)

    def communicator(self) -> str:
        return "capsule"


def test_marks_of_one_rank_are_seen_by_the_others_before_it_waits(tmp_path: Path) -> None:
    first, second = (RankMarks(tmp_path / "marks", 2, rank) for rank in (0, 1))
    ranks = MarkedRanks(Alone(), second)  # type: ignore[arg-type]
    assert first.counts() == (0, 0)
    x = torch.ones(2)
    assert ranks.add_up(x).tolist() == [2, 2] and first.counts() == (0, 1)
    assert ranks.join(x).shape == (4,) and first.counts() == (0, 2) == second.counts()
    assert ranks.communicator() == "capsule" and first.counts() == (0, 2)


def test_the_limit_is_a_setting_of_llm() -> None:
    with pytest.raises(ConfigError, match="rank_timeout"):
        LLM("nowhere", rank_timeout=0)
