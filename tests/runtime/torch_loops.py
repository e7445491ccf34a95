"""Engines over torch sessions with and without a device loop, on a CPU or a GPU, and random traffic for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtllm_replayssm.runtime.ahead import steps_ahead
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.engine_config import EngineConfig
from trtllm_replayssm.runtime.options import MTPDecodingConfig, NGramDecodingConfig, SpeculativeConfig
from trtllm_replayssm.runtime.outputs import request_output
from trtllm_replayssm.runtime.pools.poison import poison_dead_memory
from trtllm_replayssm.runtime.replica import make_drafter
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession

DRAFTS = 3
KINDS: dict[str, SpeculativeConfig | None] = {
    "plain": None,
    "ngram": NGramDecodingConfig(max_draft_len=DRAFTS, max_matching_ngram_size=3),
    "mtp": MTPDecodingConfig(max_draft_len=DRAFTS),
    "mtp-sampled": MTPDecodingConfig(max_draft_len=DRAFTS, sample_drafts=True),
}
Answers = dict[int, list[tuple[list[int], str | None]]]
"""By request: tokens and finish reason of every choice."""


@dataclass(frozen=True)
class Event:
    """At engine step `step`: a request (prompt and settings), or a cancellation or preemption of request `which`."""

    step: int
    what: str
    prompt: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    which: int = 0


def make_engine(session: TorchSession, kind: str, *, ahead: bool, debug: bool = False) -> Engine:
    """An engine that may use every slot but one: a bystander can hold that."""
    config = EngineConfig(
        max_batch_size=session.pool.slots - 1, max_num_tokens=session.pool.slots * (1 + DRAFTS) + 64, prefill_chunk=16,
        debug=debug,
    )  # fmt: skip
    steps = steps_ahead(session, KINDS[kind], wanted=True, keeps_ends=False) if ahead else None
    return Engine(session, make_drafter(KINDS[kind], session), None, config, steps)


def traffic(
    count: int, vocab: int, *, seed: int, longest: int, disturb: bool = True, every: int = 2
) -> list[Event]:
    """`count` requests, one in `every` steps, greedy and sampled in every way, some cancelled or moved out."""
    rng, events = np.random.default_rng(seed), []
    for i in range(count):
        step = int(rng.integers(0, every * count))
        period = rng.integers(1, vocab, rng.integers(1, 6))
        prompt = np.resize(period, rng.integers(1, 40))  # repeats itself, so that n-grams match
        settings: dict[str, Any] = {"max_tokens": int(rng.integers(1, longest)), "seed": i, "end_id": -1}
        settings |= SETTINGS[int(rng.integers(0, len(SETTINGS)))]
        events.append(Event(step, "add", tuple(int(t) for t in prompt), settings))
        if disturb and rng.random() < 0.8:
            events.append(Event(step + int(rng.integers(1, 12)), str(rng.choice(["cancel", "preempt"])), which=i))
    return sorted(events, key=lambda event: event.step)


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "min_p": 0.05, "n": 2},
    {"stop_token_ids": [3, 5, 7]},
    {"presence_penalty": 0.5},  # needs the host
)


def bystander(session: TorchSession) -> tuple[int, str]:
    """A slot that no engine knows, and the hash of what it holds (dead memory is poisoned, as in debugging)."""
    slot = session.allocate(seed=99)
    session.prefill([PrefillChunk(slot, [3, 1, 4, 1, 5, 9, 2, 6], True)])
    session.decode([DecodeRow(slot, [5])])
    session.commit([1])
    poison_dead_memory(session.pools)
    return slot, session.pools.slot_hash(slot)


def run(engine: Engine, events: list[Event], after: Callable[[int], None] | None = None) -> Answers:
    """Play the events -> (tokens, finish reason) of every choice, by the number of its `add` event.

    after: called with the number of each step that has run.
    """
    done: Answers = {}
    left, step, numbers = list(events), 0, {}
    adds = [event for event in events if event.what == "add"]
    while left or engine.has_work:
        while left and left[0].step <= step:
            event = left.pop(0)
            if event.what == "add":
                numbers[engine.add_request(event.prompt, SamplingParams(**event.settings))] = adds.index(event)
                continue
            number = next((n for n, i in numbers.items() if i == event.which), None)
            if number is None:
                continue
            if event.what == "preempt":
                engine.preempt(number)
            elif (output := engine.cancel(number)) is not None:
                done[numbers[number]] = [(o.token_ids, o.finish_reason) for o in output.outputs]
        for request in engine.step():
            if request.finished:
                output = request_output(request)
                done[numbers[request.request_id]] = [(o.token_ids, o.finish_reason) for o in output.outputs]
        if after is not None:
            after(step)
        step += 1
    return done


def assert_same(got: Answers, want: Answers) -> None:
    """Equal tokens and ends; of a cancelled choice one is the beginning of the other."""
    assert got.keys() == want.keys()
    for number, choices in got.items():
        for (tokens, reason), (others, other_reason) in zip(choices, want[number], strict=True):
            if "cancelled" in (reason, other_reason):
                shared = min(len(tokens), len(others))
                assert tokens[:shared] == others[:shared], number
            else:
                assert (tokens, reason) == (others, other_reason), number
