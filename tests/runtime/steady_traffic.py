"""Traffic without end: batches that fill and empty, cancellations, preemptions, the same prompts again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.outputs import RequestOutput, request_output
from trtllm_replayssm.runtime.sampling.params import SamplingParams

STOPS = (3, 5, 7)
EVERY = 16  # steps
_GREEDY: tuple[dict[str, Any], ...] = ({}, {}, {"stop_token_ids": list(STOPS)})
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "min_p": 0.05, "n": 2},
)
_BY_THE_HOST: dict[str, Any] = {"presence_penalty": 0.5}


@dataclass(frozen=True)
class Served:
    """A greedy request that has ended: its prompt, what it asked for, its tokens and why they end."""

    prompt: tuple[int, ...]
    settings: dict[str, Any]
    tokens: tuple[int, ...]
    reason: str | None

    def ends_well(self) -> bool:
        """Whether the reason is the one that the tokens give."""
        stops, limit = self.settings.get("stop_token_ids", ()), self.settings["max_tokens"]
        stopped = any(token in stops for token in self.tokens)
        if any(token in stops for token in self.tokens[:-1]) or len(self.tokens) > limit:
            return False
        return self.reason == ("stop" if stopped else "length" if len(self.tokens) == limit else "cancelled")


def prompts(count: int, vocab: int, *, seed: int) -> list[tuple[int, ...]]:
    """Of 1 to 12 tokens, one in six of 17 to 39, each a short pattern again and again, so that n-grams match."""
    rng = np.random.default_rng(seed)
    periods = [rng.integers(1, vocab, rng.integers(1, 6)) for _ in range(count)]
    lengths = [rng.integers(17, 40) if i % 6 == 5 else rng.integers(1, 13) for i in range(count)]
    return [tuple(int(t) for t in np.resize(p, n)) for p, n in zip(periods, lengths, strict=True)]


class SteadyTraffic:
    """Admits, cancels and preempts at random; what its greedy requests got is in `served`.

    Every sixteenth step cancels one request or none, preempts another, mostly a young one, which has few tokens to
    come back with, and fills up, so that prompts come together: one takes as long as some steps, and so do many. How
    many requests are wanted at once changes every hundred steps or so, between a quarter and five quarters of the
    batch, mostly few, so that some wait and some steps have few rows. A request gets 1 to `longest` new tokens. One in
    six samples, one in a thousand needs the host.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[tuple[int, ...]], batch: int, *, longest: int, seed: int
    ) -> None:
        self._engine, self._prompts, self._batch, self._longest = engine, prompts, batch, longest
        self._rng = np.random.default_rng(seed)
        self._live: dict[int, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self.served: list[Served] = []
        self.admitted = 0

    def run(self, steps: int, after: Callable[[int], None]) -> None:
        """Step as many times, then until nothing is left; `after` gets each step's number. May be called again."""
        step = 0
        while step < steps or self._engine.has_work:
            if step < steps:
                self._disturb(step)
            for request in self._engine.step():
                if request.finished:
                    self._ended(request.request_id, request_output(request))
            after(step)
            step += 1

    def _disturb(self, step: int) -> None:
        if step % EVERY != 0:
            return
        if step % (6 * EVERY) == 0:
            self._wanted = self._batch // 4 + int((self._batch + 1) * self._rng.random() ** 4)
        if self._live:
            self._engine.preempt(self._any() if step % (16 * EVERY) == 0 else max(self._live))
        if self._live and self._rng.random() < 0.5:
            self._cancel(self._any())
        while len(self._live) < self._wanted:
            self._add()

    def _any(self) -> int:
        return int(self._rng.choice(list(self._live)))

    def _cancel(self, number: int) -> None:
        output = self._engine.cancel(number)
        if output is not None:
            self._ended(number, output)

    def _add(self) -> None:
        prompt = self._prompts[int(self._rng.integers(len(self._prompts)))]
        kind = self._rng.random()
        pool = _SAMPLED if kind < 1 / 6 else _GREEDY
        settings = dict(_BY_THE_HOST if kind > 0.999 else pool[int(self._rng.integers(len(pool)))])
        settings |= {"max_tokens": int(self._rng.integers(1, self._longest + 1)), "seed": self.admitted, "end_id": -1}
        self._live[self._engine.add_request(prompt, SamplingParams(**settings))] = (prompt, settings)
        self.admitted += 1

    def _ended(self, number: int, output: RequestOutput) -> None:
        prompt, settings = self._live.pop(number)
        if not {"temperature", "presence_penalty"} & settings.keys():
            [choice] = output.outputs
            self.served.append(Served(prompt, settings, tuple(choice.token_ids), choice.finish_reason))
