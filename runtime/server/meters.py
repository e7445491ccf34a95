"""Latencies and outcomes of requests as the server sees them: histograms, a ring of recent requests, recent waits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from prometheus_client import Histogram

from trtllm_replayssm.runtime.llm import RequestOutput

RECENT = 1000
WAITS = 64
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (*_FAST[3:], 30.0, 60.0, 120.0, 300.0)


class Meters:
    """Fed with the last output of each request; lives in the event loop's thread."""

    def __init__(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, registry=None, buckets=buckets)

        self.queue = histogram("trtllm_request_queue_time_seconds", "Arrival to first slot.", _SLOW)
        self.first = histogram("trtllm_time_to_first_token_seconds", "Arrival to first token.", _SLOW)
        self.total = histogram("trtllm_e2e_request_latency_seconds", "Arrival to end.", _SLOW)
        self.per_token = histogram(
            "trtllm_time_per_output_token_seconds", "First token to end, per token after the first.", _FAST
        )
        self.finished: Counter[str] = Counter()  # choices by finish reason
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._waits: deque[float] = deque(maxlen=WAITS)

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """All histograms."""
        return self.queue, self.first, self.total, self.per_token

    def recent_wait(self) -> float:
        """Median queue time of the latest requests in seconds; 0 before the first."""
        return sorted(self._waits)[len(self._waits) // 2] if self._waits else 0.0

    def observe(self, outputs: Iterable[RequestOutput]) -> None:
        """Requests whose call is over; those that were aborted count as cancelled and have no latency."""
        for output in outputs:
            for choice in output.outputs:
                self.finished[choice.finish_reason or "cancelled"] += 1
            self._observe(output)

    def _observe(self, output: RequestOutput) -> None:
        times, tokens = output.times, sum(choice.length for choice in output.outputs)
        if times.admitted is None or times.first_token is None or times.finished is None:
            return
        wait = times.admitted - times.arrived
        decoding = times.finished - times.first_token
        longest = max(choice.length for choice in output.outputs)
        self._waits.append(wait)
        self.queue.observe(wait)
        self.first.observe(times.first_token - times.arrived)
        self.total.observe(times.finished - times.arrived)
        if longest > 1:
            self.per_token.observe(decoding / (longest - 1))
        self.recent.append(
            {
                "request_id": output.request_id,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": tokens,
                "finish_reasons": [choice.finish_reason for choice in output.outputs],
                "perf_metrics": {
                    "queue_seconds": wait,
                    "time_to_first_token_seconds": times.first_token - times.arrived,
                    "e2e_seconds": times.finished - times.arrived,
                },
            }
        )
