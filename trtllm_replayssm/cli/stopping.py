"""Commands that take long and are told to stop: what is half written is removed first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StoppedError(BaseException):
    """A signal asked the command to stop; not an `Exception`, so that only clean-up runs on its way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stopped_by_signals(*, at_once: bool) -> Iterator[Callable[[], None]]:
    """Yields a function that raises once a signal asked to stop: KeyboardInterrupt for SIGINT, StoppedError for SIGTERM
    and SIGHUP. Call it now and then.

    at_once: the first signal raises by itself as well, wherever the program is; later ones do not disturb the clean-up.
    That does not do where a library calls back, which would meet the exception, and is not enough where Python drops
    it, in a destructor. A signal that is ignored (SIGHUP under nohup) stays so.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            raise KeyboardInterrupt if received[0] == signal.SIGINT else StoppedError(received[0])

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if at_once and len(received) == 1:
            check()

    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield check
        return
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, stop) for n in asked if signal.getsignal(n) not in (signal.SIG_IGN, None)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
