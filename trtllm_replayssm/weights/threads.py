"""Work on many arrays by several threads, as NumPy lets go of Python's lock: results in order, few in memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 8  # beyond these the memory is the limit

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_threads() -> int:
    """Threads for `in_order`: the processors that this process may use, at most MOST_THREADS."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    processors = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(MOST_THREADS, processors)


def in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None) -> Iterator[Result]:
    """`map(work, items)` by `threads` threads (None: `usable_threads`); at most twice as many items are under way.

    Items are taken in the caller's thread, when their turn comes. What `work` raises comes out at its item's place;
    then, or when the caller stops early, no further item is begun.
    """
    count = usable_threads() if threads is None else threads
    if count <= 1:
        yield from map(work, items)
        return
    pool, waiting = ThreadPoolExecutor(count), deque[Future[Result]]()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) == 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
