"""Ranks that fail while they start: the cause is named, none is left. Those that run leave the terminal its signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.parallel.rank_failures import assert_named_and_ended
from tests.runtime.fake_session import FakeSession, hash_model
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.runtime.session.rank_marks import MarkedRanks
from trtllm_replayssm.runtime.session.rank_process import START_SECONDS, start_ranks
from trtllm_replayssm.runtime.session.ranks import ProcessRanks, Ranks
from trtllm_replayssm.runtime.session.shared_session import SharedSession

pytestmark = pytest.mark.timeout(240)
LOADING = 120.0  # seconds that a rank spends on its weights: far longer than a test may take


def make(ranks: Ranks, *, fails: int | None = None, exits: int | None = None, loads: int | None = None,
         collects: int | None = None, patient: float = 0.0) -> Session:  # fmt: skip
    """A session of one rank; each argument names the rank that does so. patient: longer than that a sum must wait."""
    rank = ranks.parallel.rank
    assert isinstance(ranks, MarkedRanks) and isinstance(ranks._ranks, ProcessRanks)
    if ranks._ranks.patience <= patient:
        raise ConfigError("make", "patience", expected=f"more than {patient}", got=ranks._ranks.patience)
    if rank == fails:
        raise ConfigError("make", "weights", expected="what it needs", got="the cause")
    if rank == exits:
        os._exit(3)
    if rank == loads:
        time.sleep(LOADING)
    if rank == collects:
        ranks.add_up(torch.ones(2))
    return FakeSession(hash_model(24), slots=2)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.mark.parametrize(
    ("size", "met", "words"),
    [
        (2, {"fails": 0, "loads": 1}, "the cause"),
        (2, {"fails": 1, "collects": 0}, r"\(rank 1\).*the cause"),
        (2, {"exits": 1, "collects": 0}, r"\(rank 1\).*its process has ended"),
        (3, {"fails": 2, "loads": 1}, r"\(rank 2\).*the cause"),
    ],
    ids=["the first, as another loads", "another, as the first waits for it", "a process", "the last, as one loads"],
)
def test_the_rank_that_failed_is_named_at_once_and_none_is_left(
    folder: Path, size: int, met: dict[str, int], words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        start_ranks(size, partial(make, **met), backend="gloo")
    assert time.monotonic() - began < LOADING
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("rank ")]
    assert not distributed.is_initialized() and not list(folder.glob("replayssm-ranks-*"))


def test_an_interrupt_from_the_terminal_is_left_to_the_first_rank() -> None:
    """A terminal sends it to every process; a server then finishes what runs, for which it needs all ranks."""
    _, processes = start_ranks(2, make, backend="gloo")
    try:
        (process,), (connection,) = processes.processes, processes.connections
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        connection.send(("allocate", (3,), {}, True))
        assert connection.recv() == (None, 0)
    finally:
        processes.hang_up()
    process.join(60)
    assert process.exitcode == 0, "it ends by itself when it is hung up on"


class Collecting(FakeSession):
    """`check_integrity` waits for all ranks; the last one does not come: it raises, or its process ends."""

    def __init__(self, ranks: Ranks, ends: bool) -> None:
        super().__init__(hash_model(24), slots=2)
        self._ranks, self._ends = ranks, ends

    def check_integrity(self) -> None:
        if self._ranks.parallel.rank == self._ranks.parallel.size - 1:
            if self._ends:
                os._exit(3)
            raise MemoryError("the cause")
        self._ranks.add_up(torch.ones(2))


def make_collecting(ranks: Ranks, *, ends: bool) -> Session:
    return Collecting(ranks, ends)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("ends", "words"), [(False, "the cause"), (True, "its process has ended")])
def test_a_rank_that_the_others_wait_for_is_named_and_the_process_starts_ranks_again(
    folder: Path, size: int, ends: bool, words: str
) -> None:
    """A collective waits as long as a start may take; nobody waits so long for a rank that is known to have failed."""
    for _ in range(2):
        own, processes = start_ranks(size, partial(make_collecting, ends=ends), backend="gloo")
        hang_up, give_up = processes.hang_up, processes.give_up
        shared = SharedSession(own, processes.connections, own.geometry, hang_up, give_up, patience=0.5)
        assert_named_and_ended(shared, f"rank {size - 1}.*{words}.*restart the replica", START_SECONDS / 10)
        for process in processes.processes:
            process.join(60)
    assert not distributed.is_initialized() and not list(folder.glob("replayssm-ranks-*"))


@pytest.mark.parametrize("limit", [5.0, 7 * 24 * 3600.0])
def test_a_sum_waits_longer_than_the_watch_does_on_every_rank(limit: float) -> None:
    """However long that is: else the kernel would give a rank up that the watch still allows to stand."""
    _, processes = start_ranks(2, partial(make, patient=limit), backend="gloo", limit=limit)
    assert processes.own.patience > limit
    processes.kill()
