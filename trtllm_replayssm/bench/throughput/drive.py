"""Sends requests to an engine as clients would: so many at once, or at random moments; and keeps what came back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from trtllm_replayssm.bench.throughput.dataset import BenchRequest
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """concurrency: requests in flight at most. request_rate: mean arrivals a second at random moments, None: at once.
    seed: of those moments.
    """

    concurrency: int
    request_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError("bench throughput", "concurrency", expected="at least 1", got=self.concurrency)
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError("bench throughput", "request_rate", expected="above 0", got=self.request_rate)

    def arrivals(self, count: int) -> list[float]:
        """Seconds after the start at which requests arrive: a Poisson process, or all zero."""
        if self.request_rate is None:
            return [0.0] * count
        draws, moment, moments = random.Random(self.seed), 0.0, []
        for _ in range(count):
            moments.append(moment)
            moment += draws.expovariate(self.request_rate)
        return moments


def drive(llm: LLM, requests: Sequence[BenchRequest], traffic: Traffic) -> list[RequestOutput]:
    """Run the requests, greedily and past end tokens -> their outputs, in the order of the requests.

    Raises RequestError for one that does not fit the engine, and what stopped the engine.
    """
    return asyncio.run(_drive(llm, requests, traffic))


async def _drive(llm: LLM, requests: Sequence[BenchRequest], traffic: Traffic) -> list[RequestOutput]:
    places, began = asyncio.Semaphore(traffic.concurrency), asyncio.get_running_loop().time()

    async def client(request: BenchRequest, arrival: float) -> RequestOutput:
        await asyncio.sleep(began + arrival - asyncio.get_running_loop().time())
        async with places:
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            return await llm.generate_async(request.prompt, params).aresult()

    arrivals = traffic.arrivals(len(requests))
    return list(await asyncio.gather(*(client(r, at) for r, at in zip(requests, arrivals, strict=True))))
