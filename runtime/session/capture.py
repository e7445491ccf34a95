"""Work that is recorded once and replayed: a CUDA graph on a GPU, a plain call elsewhere."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from trtllm_replayssm.collection import no_collection

Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)


@dataclass
class Recording:
    """Whether what runs now is recorded, or warmed up for it: a `GraphPool` says so, and who binds memory asks."""

    active: bool = False


class GraphPool:
    """Captures over one memory pool, which all graphs of a session share.

    HAZARD: the graphs use the same memory for what they compute. What one returns stays valid only until anything else
    of the pool is replayed: read it before that, or let the captured work copy it into a tensor made outside.
    """

    def __init__(
        self, device: torch.device, *, enabled: bool = True, recording: Recording | None = None,
        obstacle: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """enabled: False: nothing is recorded on a GPU either. recording: kept true while work is. obstacle: asked
        after the warm-ups of a piece of work, with the stream that will record it as the current one: why it cannot
        be. From then on nothing is recorded.
        """
        records = enabled and device.type == "cuda"
        if records:
            gc.collect()  # what a forgotten session held, this one may need; once, for it takes long
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if records else None
        self._stream = torch.cuda.Stream(device) if records else None
        self._obstacle = obstacle
        self._recording = recording or Recording()
        self._count = 0

    @property
    def records(self) -> bool:
        """Whether captured work is a graph: then `captured` runs it `warm_ups` times."""
        return self._stream is not None

    @property
    def count(self) -> int:
        """Graphs recorded so far."""
        return self._count

    def captured(self, work: Callable[[], Result], warm_ups: int = 2) -> Callable[[], Result]:
        """The work as a call without arguments: a replay of its graph, on the stream that is current then.

        The work reads and writes tensors that stay where they are, has the same launches each time and never waits for
        the device. It is run `warm_ups` times here, on a side stream (what it makes lazily must exist before the
        recording), and recorded once, which runs nothing. HAZARD: those runs are real; leave rows at slot -1, so that
        no state moves. Each replay gives the same tensors. Without a GPU the work itself is returned and nothing runs;
        where there is an obstacle, a warning says which, once, and the work itself is returned.
        """
        if self._stream is None:
            return work
        self._recording.active = True
        try:
            obstacle = self._warmed_up(self._stream, work, warm_ups)
            if obstacle is None:
                return self._recorded(self._stream, work)
        finally:
            self._recording.active = False
        _LOG.warning("steps are launched one operation after another, not replayed: %s", obstacle)
        self._stream = None
        return work

    def _warmed_up(self, stream: torch.cuda.Stream, work: Callable[[], object], warm_ups: int) -> str | None:
        """Run the work -> why it cannot be recorded."""
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(warm_ups):
                work()
            obstacle = self._obstacle()
        current.wait_stream(stream)
        return obstacle

    def _recorded(self, stream: torch.cuda.Stream, work: Callable[[], Result]) -> Callable[[], Result]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use the device meanwhile; a graph of a forgotten session that
        # is freed while another is recorded ends the recording
        with (
            no_collection(),
            torch.inference_mode(),
            torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"),
        ):
            result = work()
        self._count += 1

        def replay() -> Result:
            graph.replay()
            return result

        return replay
