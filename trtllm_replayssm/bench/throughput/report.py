"""The report of a throughput run: keys and definitions as trtllm-bench's report.json has them, times in ms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_replayssm.runtime.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a report needs of one finished request. Moments in seconds of one clock."""

    input_tokens: int
    output_tokens: int
    arrived: float
    first_token: float
    finished: float

    @classmethod
    def of(cls, output: RequestOutput) -> RequestRecord:
        """Of a request with one choice that has ended."""
        times = output.times
        assert times.first_token is not None and times.finished is not None, "a finished request"
        return cls(
            len(output.prompt_token_ids), len(output.outputs[0].token_ids), times.arrived, times.first_token,
            times.finished,
        )  # fmt: skip

    @property
    def latency(self) -> float:
        """Seconds from arrival to end."""
        return self.finished - self.arrived

    @property
    def time_to_first(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first_token - self.arrived

    @property
    def time_per_output(self) -> float:
        """Seconds between tokens after the first; 0 when there are none."""
        later = self.output_tokens - 1
        return (self.finished - self.first_token) / later if later else 0.0

    @property
    def generation_rate(self) -> float:
        """Tokens a second after the first; 0 when there are none."""
        return 1.0 / self.time_per_output if self.time_per_output > 0 else 0.0


def percentiles(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """trtllm-bench's: the element at int(n * p) of the sorted values; scaled."""
    ordered = sorted(values)
    found = {f"p{p}": ordered[int(len(ordered) * p / 100)] for p in (50, 90, 95, 99)}
    found |= {"minimum": ordered[0], "maximum": ordered[-1], "average": sum(ordered) / len(ordered)}
    return {name: value * scale for name, value in found.items()}


def acceptance_fields(acceptance: Mapping[int, int], draft_len: int, mode: str | None) -> dict[str, Any]:
    """decoding_stats: acceptance: decode steps of a row by the tokens they emitted; draft_len: drafts a step at most.

    Percentiles are over steps, not over requests as trtllm-bench's. Empty without drafts.
    """
    lengths = sorted(acceptance)
    steps = sum(acceptance.values())
    if mode is None or not steps:
        return {}
    emitted = [length for length in lengths for _ in range(acceptance[length])]
    return {
        "decoding_stats": {
            "mode": mode, "max_draft_len": draft_len,
            "acceptance_length": sum(emitted) / steps,
            "acceptance_length_percentiles": percentiles(emitted),
            "acceptance_length_histogram": {str(length): acceptance[length] for length in lengths},
        }
    }  # fmt: skip


def host_fields(launches: int, late: int) -> dict[str, Any]:
    """host: steps of the loop that runs one ahead on the device, and the share of them that the device waited for.

    Empty where no step ran that way.
    """
    return {"host": {"launches": launches, "late_launch_share": late / launches}} if launches else {}


def performance_fields(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """request_info, performance, streaming_metrics and dataset of one device."""
    first, last = min(r.arrived for r in records), max(r.finished for r in records)
    total, count = last - first, len(records)
    outputs, inputs = sum(r.output_tokens for r in records), sum(r.input_tokens for r in records)
    per_user = sum(r.generation_rate for r in records) / count
    return {
        "request_info": {
            "num_requests": count,
            "avg_num_concurrent_requests": sum(r.latency for r in records) / total,
            "avg_input_length": inputs / count, "avg_output_length": outputs / count,
        },
        "performance": {
            "total_latency_ms": 1e3 * total,
            "avg_request_latency_ms": 1e3 * sum(r.latency for r in records) / count,
            "request_throughput_req_s": count / total,
            "system_output_throughput_tok_s": outputs / total,
            "system_total_throughput_tok_s": (outputs + inputs) / total,
            "output_throughput_per_user_tok_s": per_user,
            "output_throughput_per_gpu_tok_s": outputs / total,
            "request_latency_percentiles_ms": percentiles([r.latency for r in records], 1e3),
        },
        "streaming_metrics": {
            "token_output_speed_tok_s": per_user,
            "avg_ttft_ms": 1e3 * sum(r.time_to_first for r in records) / count,
            "avg_tpot_ms": 1e3 * sum(r.time_per_output for r in records) / count,
            "tpot_percentiles": percentiles([r.time_per_output for r in records], 1e3),
            "ttft_percentiles": percentiles([r.time_to_first for r in records], 1e3),
            "gen_tps_percentiles": percentiles([r.generation_rate for r in records]),
        },
        "dataset": {
            "num_requests": count,
            "isl_stats": percentiles([r.input_tokens for r in records]),
            "osl_stats": percentiles([r.output_tokens for r in records]),
            "seq_len_stats": percentiles([r.input_tokens + r.output_tokens for r in records]),
        },
    }  # fmt: skip
