"""Response formats of one server: each schema is tried out in another process, then compiled beside the event loop.

What costs too much is refused and remembered as such for a while; what compiled is kept, within a bound on memory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.sampling.mask import LogitsMask
from trtllm_replayssm.runtime.server.errors import GenerationError
from trtllm_replayssm.runtime.server.grammar import Grammars
from trtllm_replayssm.runtime.server.limits import Limits
from trtllm_replayssm.runtime.server.offload import Workers
from trtllm_replayssm.runtime.server.protocol.common import ResponseFormat
from trtllm_replayssm.runtime.server.run import STOPPED
from trtllm_replayssm.runtime.server.schema import schema_text
from trtllm_replayssm.runtime.server.trials import Trial, Trials

THREADS = 2  # schemas at a time: one slow schema does not hold up the others
MAX_WAITING = 16
CACHE_BYTES = 64 << 20
REFUSED_SECONDS = 60.0  # for which a refusal is remembered: it may have been the machine that was slow
MAX_REFUSED = 256


class Guided:
    """Masks for response formats. Its coroutines run in the event loop's thread."""

    def __init__(self, make: Callable[[], Grammars], limits: Limits) -> None:
        """make: loads the compiler; called once, in any thread. Raises where there can be none."""
        self._make = make
        self._limits = limits
        self._making = threading.Lock()
        self._tools: tuple[Grammars, Trials] | None = None
        self._workers = Workers("JSON schema", threads=THREADS, max_waiting=MAX_WAITING)
        self._compiled: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, RequestError]] = OrderedDict()
        self._closed = False
        self.cached_bytes = 0

    def prepare(self) -> tuple[Grammars, Trials]:
        """Load the compiler and start the process for trials; slow the first time. Raises UnsupportedError or
        RequestError where grammars are not served, GenerationError (503) once closed.
        """
        with self._making:
            if self._tools is None and not self._closed:
                grammars = self._make()
                self._tools = grammars, Trials(grammars.tokenizer, self._limits.schema_seconds)
            if self._tools is None or self._closed:
                raise GenerationError(STOPPED, status=503)
            self._tools[1].start()
            return self._tools

    async def mask(self, wanted: ResponseFormat) -> LogitsMask:
        """The token mask of a json_object or json_schema format.

        Raises RequestError for a schema that does not compile or costs too much, UnsupportedError without a compiler,
        OverloadedError (429) when too many wait for it, GenerationError (503) when the server stops. A caller that is
        cancelled leaves at once, and its schema with it.
        """
        text = schema_text(wanted, self._limits.schema_bytes)
        self._check_refused(text)
        if text not in self._compiled:
            work = _Compilation(self, text)
            try:
                self._keep(text, await self._workers.run(work.run))
            except asyncio.CancelledError:
                work.cancel()
                raise
            except RequestError as error:
                self._refuse(text, error)
                raise
        self._compiled.move_to_end(text)
        assert self._tools is not None, "something was compiled"
        return self._tools[0].mask(self._compiled[text][0])

    def close(self) -> None:
        """End what is on trial, with GenerationError (503) for who waits; nothing starts after this."""
        self._closed = True
        if self._tools is not None:
            self._tools[1].close()

    def _keep(self, text: str, grammar: Any) -> None:
        if text in self._compiled:  # asked twice at the same time
            return
        size = int(grammar.memory_size_bytes) + len(text)
        self._compiled[text] = (grammar, size)
        self.cached_bytes += size
        while self.cached_bytes > CACHE_BYTES and len(self._compiled) > 1:
            _, (_, size) = self._compiled.popitem(last=False)
            self.cached_bytes -= size

    def _refuse(self, text: str, error: RequestError) -> None:
        self._refused[text] = (time.monotonic() + REFUSED_SECONDS, error)
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def _check_refused(self, text: str) -> None:
        until, error = self._refused.get(text, (0.0, None))
        if error is None:
            return
        if time.monotonic() > until:
            del self._refused[text]
            return
        raise RequestError(error.operation, error.argument, expected=error.expected, got=error.got)


class _Compilation:
    """One schema on its way through trial and compilation, in a thread of its own."""

    def __init__(self, guided: Guided, text: str) -> None:
        self._guided = guided
        self._text = text
        self._lock = threading.Lock()
        self._trial: tuple[Trials, Trial] | None = None
        self._cancelled = False

    def run(self) -> Any:
        """The compiled grammar. Raises as `Guided.mask` says."""
        grammars, trials = self._guided.prepare()
        with self._lock:
            if self._cancelled:
                raise GenerationError("nobody waits for it", status=503)
            trial = trials.submit(self._text)
            self._trial = trials, trial
        trials.wait(trial)
        return grammars.compile(self._text)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._cancelled = True
            if self._trial is not None:
                trials, trial = self._trial
                trials.cancel(trial)
