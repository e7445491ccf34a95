"""How far each of several ranks has got, where all of them see it: which one the others wait for follows from it."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.ops.native_ranks import Inboxes
from trtllm_replayssm.runtime.session.ranks import Ranks

_BYTES = 8  # of a count


class RankMarks:
    """One count a rank of the calls and collectives that it has begun, in a file that every rank has mapped.

    Each rank writes its own; the counts of ranks that do the same differ where one of them has not arrived.
    """

    def __init__(self, path: Path, size: int, rank: int) -> None:
        """path: the same of all ranks; made by the one that comes first."""
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, size * _BYTES)
            self._counts = memoryview(mmap.mmap(file, size * _BYTES)).cast("Q")
        finally:
            os.close(file)
        self._rank = rank

    def add(self) -> None:
        """This rank begins something."""
        self._counts[self._rank] += 1

    def counts(self) -> tuple[int, ...]:
        """Rank after rank, as they are now."""
        return tuple(self._counts)


class MarkedRanks:
    """Implements `Ranks` over others: marks each collective before this rank waits in it.

    A replayed graph holds collectives that nothing marks; the call that replays it is marked.
    """

    def __init__(self, ranks: Ranks, marks: RankMarks) -> None:
        self.parallel = ranks.parallel
        self._ranks, self._marks = ranks, marks

    def add_up(self, x: Tensor) -> Tensor:
        """See `Ranks.add_up`."""
        self._marks.add()
        return self._ranks.add_up(x)

    def join(self, x: Tensor) -> Tensor:
        """See `Ranks.join`."""
        self._marks.add()
        return self._ranks.join(x)

    def inboxes(self, rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Inboxes | None:
        """See `Ranks.inboxes`."""
        self._marks.add()
        opened = self._ranks.inboxes(rows, channels, dtype, device)
        return None if opened is None else replace(opened, began=self._marks.add)

    def communicator(self) -> Any:
        """See `Ranks.communicator`."""
        return self._ranks.communicator()
