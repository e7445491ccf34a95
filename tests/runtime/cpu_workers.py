"""CPU sessions in processes of their own, a thread each, that read texts while the device still makes others.

A token of a tiny model takes a CPU session milliseconds, however many texts share its steps: the texts of a long run
are parted among processes. Logits go through files, those of a text that is the CPU's choice throughout not at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from tests.runtime.cpu_judge import Text, forced, gaps_of
from trtllm_replayssm.runtime.session.base import Logits, Session

TOGETHER = 4  # texts of a process at a time
Open = Callable[[Path], Session]


class CpuWorkers:
    """Reads texts with `open_cpu(model)`, of a module, in each of `count` processes, `width` tokens a step."""

    def __init__(self, open_cpu: Open, model: Path, count: int, width: int) -> None:
        """The processes start at once."""
        self._folder = Path(tempfile.mkdtemp())
        self._opened, self._width = (open_cpu, model), width
        self._begun: dict[Text, tuple[Future[list[Path | None]], int]] = {}
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), _start, self._opened)
        self._pool.submit(os.getpid)

    def __enter__(self) -> CpuWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder)

    def begin(self, texts: Sequence[Text]) -> None:
        """Read those that are new, the longest first; returns at once."""
        new = sorted((text for text in texts if text not in self._begun), key=lambda text: -len(text[1]))
        for first in range(0, len(new), TOGETHER):
            part = new[first : first + TOGETHER]
            future = self._pool.submit(_read, *self._opened, part, self._width, self._folder / str(len(self._begun)))
            self._begun.update({text: (future, place) for place, text in enumerate(part)})

    def logits(self, texts: Sequence[Text]) -> Iterator[Logits | None]:
        """The logits [n, V] before each of the n tokens of each text, None where each token is the CPU's choice. Other
        texts are not begun any more.
        """
        self.begin(texts)
        wanted = {self._begun[text][0] for text in texts}
        for future, _ in self._begun.values():
            if future not in wanted:
                future.cancel()
        for text in texts:
            future, place = self._begun[text]
            path = future.result()[place]
            yield None if path is None else np.load(path)


@cache
def _session(open_cpu: Open, model: Path) -> Session:
    """This process's."""
    return open_cpu(model)


def _start(open_cpu: Open, model: Path) -> None:
    os.nice(5)  # the engine comes first
    torch.set_num_threads(1)
    _session(open_cpu, model)


def _read(open_cpu: Open, model: Path, texts: Sequence[Text], width: int, name: Path) -> list[Path | None]:
    """Files of the texts' logits; None where each token is the CPU's choice."""
    paths: list[Path | None] = []
    for place, (text, want) in enumerate(zip(texts, forced(_session(open_cpu, model), texts, width), strict=True)):
        path = name.with_suffix(f".{place}.npy") if gaps_of(text, want).any() else None
        paths.append(path)
        if path is not None:
            np.save(path, want)
    return paths
