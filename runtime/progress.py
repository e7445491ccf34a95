"""The progress bar of `LLM.generate`, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each of `total` requests; shown=False: it does nothing."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)
