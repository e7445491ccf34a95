"""The processes of a replica's further ranks: started by the first, they run the calls it sends until it hangs up."""

from __future__ import annotations

import gc
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from torch import distributed

from trtllm_replayssm.config import RANK_TIMEOUT
from trtllm_replayssm.errors import ConfigError, ReplaySSMError
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.runtime.session.rank_marks import MarkedRanks, RankMarks
from trtllm_replayssm.runtime.session.rank_parts import RankParts
from trtllm_replayssm.runtime.session.rank_watch import ENDED, RankWatch
from trtllm_replayssm.runtime.session.ranks import ProcessRanks, Ranks
from trtllm_replayssm.weights.tensor_parallel import TensorParallel

START_SECONDS = 600.0  # between two meetings of ranks that start: loading a large checkpoint on a slow disk
MakeSession = Callable[[Ranks], Session]
"""Makes one rank's session; sent to other processes, so it is a function of a module or a partial of one."""
_MARKS = "marks"


@dataclass(frozen=True)
class Meeting:
    """How ranks find each other. folder: of this machine; timeout: what a collective waits by itself, and a sum."""

    folder: Path
    backend: str
    timeout: timedelta

    def join(self, parallel: TensorParallel) -> None:
        """Wait for the other ranks; from then on collectives reach them."""
        distributed.init_process_group(
            self.backend, init_method=f"file://{self.folder / 'store'}", rank=parallel.rank,
            world_size=parallel.size, timeout=self.timeout,
        )  # fmt: skip

    def ranks(self, parallel: TensorParallel) -> ProcessRanks:
        """A rank's view of all, for after it has joined them."""
        return ProcessRanks(parallel, self.timeout.total_seconds())


@dataclass(frozen=True)
class RankProcesses:
    """The further ranks, rank 1 first. connections: one to each. folder: where all ranks found each other. marks: of
    all ranks, counted here for the first. own: the first rank's view of them.
    """

    folder: Path
    marks: RankMarks
    own: ProcessRanks
    processes: list[BaseProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def hang_up(self) -> None:
        """End them. On a CPU this process may start ranks again; NCCL's communicators cannot be destroyed while
        recorded graphs hold them, so on GPUs they stay until the process ends, and the folder, which their threads
        may read, with them.
        """
        for connection in self.connections:
            connection.close()
        if distributed.is_initialized():
            if distributed.get_backend() != "gloo":
                return
            distributed.destroy_process_group()
        shutil.rmtree(self.folder, ignore_errors=True)

    def give_up(self) -> None:
        """End them whatever they do: one that loads weights, or waits for another, would not notice a hang-up. What
        waits for them here, in any thread, comes back: gloo sees that they are gone, and NCCL, which does not, is
        aborted, so that this process may start ranks again; our own kernels are told.
        """
        self.own.give_up()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        if distributed.is_initialized() and distributed.get_backend() != "gloo":
            distributed.distributed_c10d._abort_process_group()

    def kill(self) -> None:
        """Give up, and let go of what is theirs."""
        self.give_up()
        self.hang_up()

    def require(self, said: Collection[int] = ()) -> None:
        """Wait until every rank but `said` says that it got so far. Raises ConfigError for the first that does not."""
        waited = {connection: rank for rank, connection in enumerate(self.connections, 1) if rank not in said}
        while waited:
            for connection in wait(list(waited)):
                rank = waited.pop(cast(Connection, connection))
                _require(rank, cast(Connection, connection))

    def require_none_failed(self) -> None:
        """Raise ConfigError for a rank that has failed by now."""
        for rank, connection in enumerate(self.connections, 1):
            if connection.poll():
                _require(rank, connection)


def start_ranks(
    size: int, make: MakeSession, *, backend: str, limit: float = RANK_TIMEOUT
) -> tuple[Session, RankProcesses]:
    """Start ranks 1..size-1 in processes and rank 0 here -> its session, and the others.

    backend: of torch.distributed, "nccl" or "gloo". limit: seconds after which a watch over the ranks gives up; what
    they wait for by themselves is longer. The processes are daemons: they end with this one. Raises ConfigError with
    what a rank met while it started, and where this process has another such replica; what rank 0 meets itself is
    raised as it is, unless another rank's failure is behind it. No process is left then.
    """
    if distributed.is_initialized():
        raise ConfigError(
            "LLM", "tensor_parallel_size", expected="one replica over several ranks in a process", got="a second one",
            hint="Shut down the first, or use another process",
        )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    folder = Path(tempfile.mkdtemp(prefix="replayssm-ranks-"))
    place = Meeting(folder, backend, timedelta(seconds=START_SECONDS + limit))
    processes = RankProcesses(folder, RankMarks(folder / _MARKS, size, 0), place.ranks(TensorParallel(size, 0)))
    try:
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            arguments = (TensorParallel(size, rank), place, make, theirs)
            process = context.Process(target=_run, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()  # so that the process's end is seen here
            processes.processes.append(process)
            processes.connections.append(ours)
        processes.require()  # they run: only then are they waited for without an end in sight
        watch = RankWatch(
            processes.connections, processes.give_up, patience=0.0, marks=processes.marks, limit=START_SECONDS
        )
        try:
            session = _first_session(processes, watch, place, make)
        finally:
            watch.stop()
        if watch.culprit is not None:
            raise _not_started(*watch.culprit)
        processes.require(watch.heard)
    except BaseException:
        processes.kill()
        raise
    return session, processes


def _first_session(others: RankProcesses, watch: RankWatch, place: Meeting, make: MakeSession) -> Session:
    try:
        with watch:
            place.join(others.own.parallel)
            return make(MarkedRanks(others.own, others.marks))
    except ReplaySSMError:
        raise
    except Exception:  # of a collective, say, that another rank's end broke: the cause is there
        if watch.culprit is not None:
            raise _not_started(*watch.culprit) from None
        others.require_none_failed()
        raise


def serve(
    session: Session, connection: Connection, mark: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Answer calls (method, arguments, keywords, wanted) with (error text or None, answer if wanted) until hung up.

    Calls are those of `RankParts`. mark: that a call has come. check: raises where what a call gave means nothing after
    all.
    """
    parts = RankParts(session)
    while True:
        try:
            method, arguments, keywords, wanted = connection.recv()
        except (EOFError, OSError):
            return
        mark()
        error: str | None = None
        answer: Any = None
        try:
            answer = parts.call(method, arguments, keywords)
            check()
        except Exception as met:
            error = f"{type(met).__name__}: {met}"
        try:
            connection.send((error, answer if wanted else None))
        except OSError:
            return


def _run(parallel: TensorParallel, place: Meeting, make: MakeSession, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the first rank may finish requests
    marks = RankMarks(place.folder / _MARKS, parallel.size, parallel.rank)
    connection.send((None, None))
    marks.add()  # as the first rank does where its watch begins
    ranks = place.ranks(parallel)
    try:
        place.join(parallel)
        session = make(MarkedRanks(ranks, marks))
    except Exception as met:
        with suppress(OSError):
            connection.send((f"{type(met).__name__}: {met}", None))
        raise
    connection.send((None, None))
    serve(session, connection, marks.add, ranks.require_sums)
    session.close()
    del session  # its recorded graphs first: they hold the communicators
    gc.collect()
    distributed.destroy_process_group()


def _require(rank: int, connection: Connection) -> None:
    """What the rank says of itself, waited for: that it got so far, else ConfigError."""
    try:
        error, _ = connection.recv()
    except (EOFError, OSError):
        error = ENDED
    if error is not None:
        raise _not_started(rank, error)


def _not_started(rank: int, met: str) -> ConfigError:
    guard = " (a script that starts ranks needs `if __name__ == \"__main__\":` around its calls)"
    return ConfigError(
        "LLM", f"tensor_parallel_size (rank {rank})", expected="a rank that starts",
        got=met + guard if met == ENDED else met,
    )  # fmt: skip
