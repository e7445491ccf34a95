"""Whether the server can generate: one token of its own, or any token of anybody while it waits for that one.

The probe stands outside the bounded queue, because a full queue is no illness; and a queue that moves proves as much as
the probe's own token, which may have to wait behind it. All who ask at once share one probe.
"""

from __future__ import annotations

import asyncio
import time

from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.server.errors import GenerationError
from trtllm_replayssm.runtime.server.service import Service

POLL_SECONDS = 0.02


class Readiness:
    """Asks the engine of one service."""

    def __init__(self, service: Service, seconds: float) -> None:
        """seconds: without any token before the engine counts as stuck."""
        self._service = service
        self._seconds = seconds
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return when a token was generated. Raises GenerationError (503), OverloadedError while the server stops."""
        self._check()
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._generate())
        await asyncio.shield(self._running)

    def _check(self) -> None:
        if self._service.llm.failure is not None:
            raise GenerationError("the engine stopped", status=503)
        self._service.gate.check_open()

    def _tokens(self) -> object:
        return self._service.llm.stats()["output_tokens"]

    async def _generate(self) -> None:
        before, deadline = self._tokens(), time.monotonic() + self._seconds
        handle = self._service.llm.generate_async([0], SamplingParams(max_tokens=1, detokenize=False))
        try:
            while not handle.finished and self._tokens() == before:
                if time.monotonic() > deadline:
                    raise GenerationError(f"no token within {self._seconds:g} seconds", status=503)
                await asyncio.sleep(POLL_SECONDS)
                self._check()
            self._check()
            if any(choice.finish_reason == "error" for choice in handle.outputs):
                raise GenerationError(handle.outputs[0].error or "an unknown fault", status=503)
        finally:
            handle.abort()
