"""Watches the ranks during a call: one that fails, ends or hangs would leave the others waiting in a collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from threading import Event, Lock, Thread
from typing import Any

from trtllm_replayssm.config import RANK_TIMEOUT
from trtllm_replayssm.runtime.session.rank_marks import RankMarks

PATIENCE = 10.0  # seconds in which the first rank may meet by itself what another one has met
ENDED = "its process has ended"
_PERIOD = 0.5  # seconds between two looks
Reply = tuple[str | None, Any]
"""Error text or None, and the answer."""


class RankWatch:
    """Reads the ranks' replies to one call after another. With `with`, around what the first rank does of a call:

    a rank whose process has ended, or that says that it failed `patience` seconds before the first rank comes back,
    is the `culprit`, and `give_up` is called, in a thread of its own, so that the first rank comes back. So is, when no
    rank has got further for `limit` seconds, the one that is behind the others.
    """

    def __init__(
        self, connections: Sequence[Connection], give_up: Callable[[], None], *, patience: float = PATIENCE,
        marks: RankMarks | None = None, limit: float = RANK_TIMEOUT,
    ) -> None:  # fmt: skip
        """connections: one to each further rank. give_up: ends all of them, and what waits for them here. marks: how
        far each rank is; None: nobody knows.
        """
        self.culprit: tuple[int, str] | None = None
        self._connections = list(connections)
        self._give_up, self._patience = give_up, patience
        self._marks, self._limit = marks, limit
        self._progress: tuple[object, float] = None, 0.0  # how far everybody was, and since when
        self._early: dict[int, Reply | None] = {}  # read during the call; None: of a process that has ended
        self._heard: set[int] = set()  # ranks whose reply was read
        self._failed: dict[int, float] = {}  # when a rank was seen to have failed, by this machine's clock
        self._busy, self._lock, self._stopped = False, Lock(), Event()
        Thread(target=self._run, daemon=True, name="rank watch").start()

    def __enter__(self) -> RankWatch:
        self._early.clear()
        self._heard.clear()
        self._failed.clear()
        if self._marks is not None:
            self._marks.add()
        self._progress = self._far(), time.monotonic()
        self._busy = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._busy = False

    def answer(self, rank: int) -> Reply | None:
        """A rank's reply to the call, waited for; None when its process has ended, or there is a `culprit`."""
        if rank in self._early:
            return self._early.pop(rank)
        connection = self._connections[rank - 1]
        while not _readable(connection, _PERIOD):
            if self._stands_still(time.monotonic()):
                return None
        self._heard.add(rank)
        return _read(connection)

    @property
    def heard(self) -> frozenset[int]:
        """Ranks that have replied during the call; `answer` was not asked for these."""
        return frozenset(self._early)

    def stop(self) -> None:
        """Look no more; then the connections may be closed."""
        self._stopped.set()
        with self._lock:
            self._busy = False

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD):
            with self._lock:
                if self._busy and self.culprit is None:
                    self._look()

    def _look(self) -> None:
        now = time.monotonic()
        for rank, connection in enumerate(self._connections, 1):
            if rank not in self._early and _readable(connection):
                self._early[rank] = reply = _read(connection)
                self._heard.add(rank)
                if reply is None or reply[0] is not None:
                    self._failed[rank] = now
        for rank, since in self._failed.items():
            reply = self._early[rank]
            if reply is None or now - since >= self._patience:
                self._blame(rank, ENDED if reply is None else str(reply[0]))
                return
        self._stands_still(now)

    def _stands_still(self, now: float) -> bool:
        """Whether nobody has got further for too long; then there is a culprit."""
        far = self._far()
        before, since = self._progress
        if far != before:
            self._progress = far, now
        if far != before or now - since < self._limit:
            return False
        counts = far[1] or (0,) * (1 + len(self._connections))
        waited = [rank for rank in range(1, len(counts)) if rank not in self._heard]
        behind = min([*waited, 0], key=lambda rank: counts[rank])  # equally far: one whose reply is missing
        self._blame(behind, f"no progress for {self._limit:g} s; begun by each rank: {', '.join(map(str, counts))}")
        return True

    def _far(self) -> tuple[int, tuple[int, ...]]:
        """What only changes when a rank gets further."""
        return len(self._heard), () if self._marks is None else self._marks.counts()

    def _blame(self, rank: int, met: str) -> None:
        self.culprit = rank, met
        self._give_up()


def _readable(connection: Connection, seconds: float = 0.0) -> bool:
    """Whether a reply is there, or that there will be none."""
    try:
        return connection.poll(seconds)
    except OSError:
        return True


def _read(connection: Connection) -> Reply | None:
    try:
        reply: Reply = connection.recv()
    except (EOFError, OSError):
        return None
    return reply
