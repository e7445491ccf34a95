"""Calls to ranks that fail: whoever met an error, the ranks stay in step, and the message says which one it was."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.runtime.fake_session import STATE_BYTES, FakeSession, hash_model
from trtllm_replayssm.errors import CapacityError, ContractError, DeviceError, InvariantError
from trtllm_replayssm.runtime.session import ranks as rank_sums
from trtllm_replayssm.runtime.session.base import PrefillChunk, RawArray
from trtllm_replayssm.runtime.session.rank_process import serve
from trtllm_replayssm.runtime.session.ranks import ProcessRanks
from trtllm_replayssm.runtime.session.shared_session import SharedSession
from trtllm_replayssm.weights.tensor_parallel import TensorParallel

MODEL = hash_model(24)


@contextmanager
def ranks(count: int) -> Iterator[tuple[SharedSession, list[FakeSession], list[Connection]]]:
    """A session over `count` ranks whose further ones are threads -> it, every rank's own, and the threads' ends."""
    own = [FakeSession(MODEL, slots=2) for _ in range(count)]
    pipes = [Pipe() for _ in own[1:]]
    threads = [
        threading.Thread(target=serve, args=(session, theirs), daemon=True)
        for session, (_, theirs) in zip(own[1:], pipes, strict=True)
    ]
    for thread in threads:
        thread.start()
    ours = [end for end, _ in pipes]

    def hang_up() -> None:
        for end in ours:
            end.close()

    shared = SharedSession(own[0], ours, own[0].geometry, hang_up, hang_up)
    try:
        yield shared, own, [theirs for _, theirs in pipes]
    finally:
        shared.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "a rank ends when it is hung up on"


def snapshot_of(shared: SharedSession) -> tuple[int, dict[str, RawArray]]:
    slot = shared.allocate(3)
    shared.prefill([PrefillChunk(slot, [1, 2, 3], True)])
    return 3, shared.save(slot).arrays()


def damaged(arrays: Mapping[str, RawArray], rank: int) -> dict[str, RawArray]:
    kind, shape, data = arrays[f"{rank}/cursors"]
    return {**arrays, f"{rank}/cursors": (kind, shape, data[:-1] + b"\1")}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_state_that_one_rank_refuses_is_refused_and_the_ranks_go_on(rank: int) -> None:
    with ranks(3) as (shared, own, _):
        position, arrays = snapshot_of(shared)
        assert shared.load_snapshot(position, arrays, prompt_done=True).position == 3
        with pytest.raises(ContractError, match="load_snapshot"):
            shared.load_snapshot(position, damaged(arrays, rank), prompt_done=True)
        assert shared.allocate(5) == 1
        assert [sorted(session.live) for session in own] == [[0, 1]] * 3


def test_an_error_that_all_ranks_meet_is_one_error() -> None:
    with ranks(3) as (shared, own, _):
        assert [shared.allocate(1), shared.allocate(2)] == [0, 1]
        with pytest.raises(CapacityError, match="at most 2"):
            shared.allocate(3)
        shared.free(0)
        assert [sorted(session.live) for session in own] == [[1]] * 3


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_alone_meets_an_error_is_named_and_every_answer_is_read(rank: int) -> None:
    with ranks(3) as (shared, own, _):
        own[rank].allocate(9)
        own[rank].allocate(9)
        with pytest.raises(InvariantError, match=rf"rank {max(rank, 1)}.*restart the replica"):
            shared.allocate(1)
        shared.check_integrity()
        assert shared.save(0).nbytes == 3 * STATE_BYTES, "answers of this call, none left from the call before"


def test_a_rank_that_is_gone_is_named_whether_it_hears_the_call_or_not() -> None:
    with ranks(3) as (shared, own, ends):
        own[2].allocate = lambda seed: ends[1].close()  # type: ignore[assignment,method-assign,return-value]
        for _ in range(2):  # the answer is missing, then nobody listens
            with pytest.raises(InvariantError, match=r"rank 2.*its process has ended"):
                shared.allocate(1)


def test_collectives_warn_of_nothing(tmp_path: Path) -> None:
    """A warning of torch would stand on the screen of every user, once a rank."""
    init = f"file://{tmp_path / 'store'}"
    rank_sums.distributed.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    try:
        own, x = ProcessRanks(TensorParallel(1, 0)), torch.arange(6.0).view(2, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(own.join(x), x) and torch.equal(own.add_up(x.clone()), x)
    finally:
        rank_sums.distributed.destroy_process_group()


def given_up() -> ProcessRanks:
    """As a rank stands that has waited too long for a sum."""
    own = ProcessRanks(TensorParallel(2, 0))
    own.require_sums()
    own.inboxes(4, 8, torch.bfloat16, torch.device("cpu"))
    own.give_up()  # nothing is waited for yet, so nothing is given up
    own.require_sums()
    own._gave_up = torch.ones(1, dtype=torch.int32)
    return own


def test_a_sum_waits_as_long_as_its_rank_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float] = []
    monkeypatch.setattr(rank_sums, "open_inboxes", lambda *given: heard.append(given[-1]))
    monkeypatch.setattr(rank_sums.distributed, "get_backend", lambda: "nccl")
    own = ProcessRanks(TensorParallel(2, 0), 77.0)
    own._gave_up = torch.zeros(1, dtype=torch.int32)
    own.inboxes(4, 8, torch.bfloat16, torch.device("cuda"))
    assert heard == [77.0]


def test_a_sum_that_was_given_up_is_an_error_of_the_call_on_either_side() -> None:
    check = given_up().require_sums
    with pytest.raises(DeviceError, match="sum over ranks: rank 0: expected words of every rank"):
        check()
    ours, theirs = Pipe()
    session = FakeSession(MODEL, slots=2)
    worker = threading.Thread(target=serve, args=(session, theirs), kwargs={"check": check}, daemon=True)
    worker.start()
    own = FakeSession(MODEL, slots=2)
    shared = SharedSession(own, [ours], own.geometry, ours.close, ours.close, check=check)
    with pytest.raises(DeviceError, match="sum over ranks"):
        shared.allocate(3)
    shared.close()
    worker.join(10)
    assert not worker.is_alive()
