"""One throughput measurement: requests through an engine with replay, then with the conventional state cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_replayssm._version import __version__
from trtllm_replayssm.bench.throughput.compare import Comparison, compare, margin_of
from trtllm_replayssm.bench.throughput.dataset import BenchRequest
from trtllm_replayssm.bench.throughput.drive import Traffic, drive
from trtllm_replayssm.bench.throughput.report import RequestRecord, acceptance_fields, host_fields, performance_fields
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import InvariantError
from trtllm_replayssm.runtime.llm import LLM, MTPDecodingConfig, NGramDecodingConfig
from trtllm_replayssm.runtime.outputs import RequestOutput

SpeculativeConfig = MTPDecodingConfig | NGramDecodingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSetup:
    """What an engine is made with; see `LLM`. warm_up: requests of the file that run before, untimed."""

    model: str
    dtype: str
    device: str
    max_batch_size: int
    max_seq_len: int | None
    speculative: SpeculativeConfig | None
    replay: ReplayConfig
    warm_up: int

    def engine(self, state_cache: str) -> LLM:
        """An engine with one kind of state cache; a conventional one keeps float32 states."""
        replay = self.replay if state_cache == "replay" else ReplayConfig(window=self.replay.window)
        return LLM(
            self.model, dtype=self.dtype, device=self.device, max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len, speculative_config=self.speculative, replay_config=replay,
            state_cache=state_cache,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRun:
    """What a run with one cache gave. fields: its part of the report."""

    outputs: list[RequestOutput]
    fields: dict[str, Any]


def measure(
    setup: ThroughputSetup, requests: Sequence[BenchRequest], traffic: Traffic, noise: float
) -> dict[str, Any]:
    """The report: trtllm-bench's keys for the replay run, `conventional` with the same of the other, `text_equality`.

    noise: margin in logits below which a first difference is a tie. Raises RequestError, and InvariantError when a
    request did not end as it must.
    """
    with setup.engine("replay") as llm:
        replay = _run(setup, llm, requests, traffic)
    with setup.engine("conventional") as llm:
        conventional = _run(setup, llm, requests, traffic)
        equality = compare(replay.outputs, conventional.outputs, margin_of(llm), noise)
    return {**_engine(setup, traffic), **replay.fields, **_against(replay, conventional, equality)}


def _run(setup: ThroughputSetup, llm: LLM, requests: Sequence[BenchRequest], traffic: Traffic) -> CacheRun:
    if setup.warm_up:
        drive(llm, requests[: setup.warm_up], Traffic(concurrency=traffic.concurrency))
    before = llm.stats()
    outputs = drive(llm, requests, traffic)
    after = llm.stats()
    for output, request in zip(outputs, requests, strict=True):
        choice = output.outputs[0]
        if choice.finish_reason != "length" or choice.length != request.output_tokens:
            raise InvariantError(
                "bench throughput", f"task {request.task_id}", expected=f"{request.output_tokens} tokens",
                got=f"{choice.length} tokens, {choice.finish_reason} {choice.error or ''}".strip(),
            )  # fmt: skip
    drafts = 0 if setup.speculative is None else setup.speculative.draft_len
    acceptance = _gained(before["acceptance"], after["acceptance"])
    fields = {
        **performance_fields([RequestRecord.of(output) for output in outputs]),
        **acceptance_fields(acceptance, drafts, _mode(setup.speculative)),
        **host_fields(*(_count(after, name) - _count(before, name) for name in ("launches", "late_launches"))),
    }
    return CacheRun(outputs=outputs, fields=fields)


def _engine(setup: ThroughputSetup, traffic: Traffic) -> dict[str, Any]:
    return {
        "engine": {
            "model": setup.model, "model_path": setup.model, "version": __version__, "backend": "torch",
            "dtype": setup.dtype, "state_cache": "replay", "window": setup.replay.window,
            "recurrence": setup.replay.recurrence.value,
            "read": None if setup.replay.read is None else setup.replay.read.value,
        },
        "world_info": {
            "tp_size": 1, "pp_size": 1, "ep_size": 1, "world_size": 1, "max_batch_size": setup.max_batch_size,
            "concurrency": traffic.concurrency, "issue_rate": traffic.request_rate,
        },
    }  # fmt: skip


def _against(replay: CacheRun, conventional: CacheRun, equality: Comparison) -> dict[str, Any]:
    ours, theirs = (run.fields["performance"]["system_output_throughput_tok_s"] for run in (replay, conventional))
    return {
        "conventional": conventional.fields, "text_equality": equality.fields(),
        "speed_up_over_conventional": ours / theirs if equality.green else None,
    }  # fmt: skip


def _count(stats: Mapping[str, object], name: str) -> int:
    count = stats[name]
    assert isinstance(count, int), "a counter"
    return count


def _gained(before: object, after: object) -> dict[int, int]:
    assert isinstance(before, Mapping) and isinstance(after, Mapping)
    gained = {int(length): int(count) - int(before.get(length, 0)) for length, count in after.items()}
    return {length: count for length, count in gained.items() if count}


def _mode(speculative: SpeculativeConfig | None) -> str | None:
    if speculative is None:
        return None
    return "MTP" if isinstance(speculative, MTPDecodingConfig) else "NGram"
