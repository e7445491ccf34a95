"""Of two GPUs that wait for each other over NCCL one fails, ends or hangs: it is named, and ranks start again here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.runtime.fake_session import FakeSession, hash_model
from trtllm_replayssm.errors import InvariantError
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.runtime.session.rank_process import start_ranks
from trtllm_replayssm.runtime.session.ranks import Ranks
from trtllm_replayssm.runtime.session.shared_session import SharedSession

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"{GPUS} GPUs"), pytest.mark.timeout(120)]
HANGS = 90.0  # seconds
LIMIT = 3.0


class Meeting(FakeSession):
    """`check_integrity` adds up over both GPUs and waits for the sum; rank 1 does not come the second time."""

    def __init__(self, ranks: Ranks, met: str, device: str, *, recorded: bool) -> None:
        super().__init__(hash_model(24), slots=2)
        self._rank, self._met, self._times = ranks.parallel.rank, met, 0
        self._x = torch.ones(4, device=device)
        self._run: Callable[[], object] = lambda: ranks.add_up(self._x)
        self._run()  # the communicator is made here
        if recorded:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ranks.add_up(self._x)
            self._run = graph.replay

    def check_integrity(self) -> None:
        self._times += 1
        if self._rank == 1 and self._times == 2:
            if self._met == "raises":
                raise MemoryError("the cause")
            if self._met == "ends":
                os._exit(3)
            time.sleep(HANGS)
        self._run()
        self._x.cpu()


def make(ranks: Ranks, *, met: str, recorded: bool) -> Session:
    device = f"cuda:{ranks.parallel.rank}"
    torch.cuda.set_device(device)
    return Meeting(ranks, met, device, recorded=recorded)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize(
    ("met", "words"),
    [("raises", "the cause"), ("ends", "its process has ended"), ("hangs", "no progress for 3 s")],
)
def test_a_gpu_that_the_other_waits_for_is_named(met: str, words: str, recorded: bool) -> None:
    """Each case starts ranks in the process in which the one before was given up."""
    own, others = start_ranks(2, partial(make, met=met, recorded=recorded), backend="nccl")
    shared = SharedSession(
        own, others.connections, own.geometry, others.hang_up, others.give_up, patience=0.5, marks=others.marks,
        limit=LIMIT,
    )  # fmt: skip
    try:
        shared.check_integrity()
        began = time.monotonic()
        with pytest.raises(InvariantError, match=f"rank 1.*{words}.*restart the replica"):
            shared.check_integrity()
        assert time.monotonic() - began < HANGS / 3
    finally:
        shared.close()
