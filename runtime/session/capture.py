"""Work that is recorded once and replayed: a CUDA graph on a GPU, a plain call elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected inside: a graph of a forgotten session that is freed while another is recorded ends the
    recording.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphPool:
    """Captures over one memory pool, which all graphs of a session share.

    HAZARD: the graphs use the same memory for what they compute. What one returns stays valid only until anything else
    of the pool is replayed: read it before that, or let the captured work copy it into a tensor made outside.
    """

    def __init__(self, device: torch.device, *, enabled: bool = True) -> None:
        """enabled: False: nothing is recorded on a GPU either."""
        records = enabled and device.type == "cuda"
        if records:
            gc.collect()  # what a forgotten session held, this one may need; once, for it takes long
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if records else None
        self._stream = torch.cuda.Stream(device) if records else None

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
        no state moves. Each replay gives the same tensors. Without a GPU the work itself is returned and nothing runs.
        """
        if self._stream is None:
            return work
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for _ in range(warm_ups):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use the device meanwhile
        with (
            _no_collection(),
            torch.inference_mode(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            result = work()
        self._count += 1

        def replay() -> Result:
            graph.replay()
            return result

        return replay
