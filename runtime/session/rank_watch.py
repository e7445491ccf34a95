"""Watches the further ranks while the first one computes: one that fails would leave it waiting in a collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from threading import Event, Lock, Thread
from typing import Any

PATIENCE = 10.0  # seconds in which the first rank may meet by itself what another one has met
ENDED = "its process has ended"
_PERIOD = 0.5  # seconds between two looks
Reply = tuple[str | None, Any]
"""Error text or None, and the answer."""


class RankWatch:
    """Reads the ranks' replies to one call after another. With `with`, around what the first rank does of a call:

    a rank whose process has ended, or that says that it failed `patience` seconds before the first rank comes back,
    is the `culprit`, and `give_up` is called, in a thread of its own, so that the first rank comes back.
    """

    def __init__(
        self, connections: Sequence[Connection], give_up: Callable[[], None], *, patience: float = PATIENCE
    ) -> None:
        """connections: one to each further rank. give_up: ends all of them, and what waits for them here."""
        self.culprit: tuple[int, str] | None = None
        self._connections = list(connections)
        self._give_up, self._patience = give_up, patience
        self._early: dict[int, Reply | None] = {}  # read during the call; None: of a process that has ended
        self._failed: dict[int, float] = {}  # when a rank was seen to have failed, by this machine's clock
        self._busy, self._lock, self._stopped = False, Lock(), Event()
        Thread(target=self._run, daemon=True, name="rank watch").start()

    def __enter__(self) -> RankWatch:
        self._early.clear()
        self._failed.clear()
        self._busy = True
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._busy = False

    def answer(self, rank: int) -> Reply | None:
        """A rank's reply to the call, waited for; None when its process has ended."""
        return self._early.pop(rank) if rank in self._early else _read(self._connections[rank - 1])

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
            if rank not in self._early and connection.poll():
                self._early[rank] = reply = _read(connection)
                if reply is None or reply[0] is not None:
                    self._failed[rank] = now
        for rank, since in self._failed.items():
            reply = self._early[rank]
            if reply is None or now - since >= self._patience:
                self.culprit = rank, ENDED if reply is None else str(reply[0])
                self._give_up()
                return


def _read(connection: Connection) -> Reply | None:
    try:
        reply: Reply = connection.recv()
    except (EOFError, OSError):
        return None
    return reply
