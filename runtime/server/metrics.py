"""/metrics: the engine's counters and the server's latencies in Prometheus' text form, from a registry of our own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from trtllm_replayssm.runtime.server.service import Service

_COUNTERS = {
    "steps": "Engine steps that ran something.",
    "prompt_tokens": "Prompt tokens absorbed.",
    "output_tokens": "Tokens emitted.",
    "decode_rows": "Rows of decode steps.",
    "drafted_tokens": "Draft tokens shown to the model.",
    "accepted_tokens": "Draft tokens that were emitted.",
    "flushes": "Rows whose step folded its window into the checkpoint.",
    "preemptions": "Slots moved to host memory.",
    "launches": "Steps of the loop that runs one step ahead on the device.",
    "late_launches": "Those that came when the device had ended the one before and waited.",
    "prefix_lookups": "Prompts looked up in the prefix cache.",
    "prefix_hits": "Prompts that began at a snapshot.",
    "prefix_hit_tokens": "Prompt tokens that came from the prefix cache.",
    "prefix_insertions": "Snapshots put into the prefix cache.",
    "prefix_evictions": "Snapshots that left it for others.",
    "state_bytes": "Recurrent-state traffic of the decode rows.",
    "conventional_bytes": "The same rows' traffic if every step read and wrote the state.",
}


def snapshot(service: Service) -> dict[str, Any]:
    """The numbers of the status page, ready for JSON."""
    load, stats = service.llm.load(), service.llm.stats()
    return {
        "model": service.settings.model_name,
        "stopping": service.gate.stopping,
        "running": load.running,
        "waiting": max(load.waiting, service.gate.inside - load.running),
        "max_batch_size": load.max_batch_size,
        "slots": load.slots,
        "free_slots": load.free_slots,
        "kv_positions": load.positions,
        "kv_positions_max": load.positions_max,
        "state_memory_bytes": load.state_bytes,
        "kv_memory_bytes": load.kv_bytes,
        "queue_wait_seconds": service.meters.recent_wait(),
        "refused": service.gate.refused,
        "finished": dict(service.meters.finished),
        "state_bytes_saved": _saved(stats),
        **stats,
    }


class _EngineCollector(Collector):
    """Reads the engine when it is scraped."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """All metric families."""
        now = snapshot(self._service)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"replayssm_{name}", text, value=now[name])
        yield CounterMetricFamily("replayssm_requests_refused", "Calls answered 429 or 503.", value=now["refused"])
        yield from _gauges(now)
        finished = CounterMetricFamily("trtllm_request_success", "Choices by how they ended.", labels=["finish_reason"])
        for reason, count in sorted(now["finished"].items()):
            finished.add_metric([reason], count)
        yield finished
        yield _acceptance(now["acceptance"])


def _gauges(now: dict[str, Any]) -> Iterator[GaugeMetricFamily]:
    rows = max(now["decode_rows"], 1)
    for name, text, value in (
        ("requests_running", "Choices that hold a slot.", now["running"]),
        ("requests_waiting", "Choices that wait for a slot.", now["waiting"]),
        ("batch_utilization", "Share of max_batch_size in use.", now["running"] / now["max_batch_size"]),
        ("slots_used", "State slots in use.", now["slots"] - now["free_slots"]),
        ("slots", "State slots.", now["slots"]),
        ("kv_cache_utilization", "Share of all positions in use.", now["kv_positions"] / now["kv_positions_max"]),
        ("acceptance_length", "Mean tokens emitted by a decode row.", now["mean_acceptance_length"]),
        ("flush_rate", "Flushes per decode row.", now["flushes"] / rows),
        ("state_bytes_saved", "Recurrent-state traffic saved so far.", now["state_bytes_saved"]),
        ("state_memory_bytes", "Memory of all slots' states, rings and windows.", now["state_memory_bytes"]),
        ("kv_memory_bytes", "Memory of all slots' keys and values.", now["kv_memory_bytes"]),
        ("prefix_entries", "Entries of the prefix cache.", now["prefix_entries"]),
        ("prefix_bytes", "Host memory of the prefix cache.", now["prefix_bytes"]),
        ("stopping", "1 while the server drains.", int(now["stopping"])),
    ):
        yield GaugeMetricFamily(f"replayssm_{name}", text, value=value)


def _acceptance(counts: dict[str, int]) -> HistogramMetricFamily:
    """Emitted tokens per decode row as a cumulative histogram."""
    total, weighted, buckets = 0, 0, []
    for length, count in sorted((int(key), value) for key, value in counts.items()):
        total += count
        weighted += length * count
        buckets.append((str(float(length)), total))
    family = HistogramMetricFamily("replayssm_accepted_tokens_per_row", "Tokens emitted by a decode row.")
    family.add_metric([], [*buckets, ("+Inf", total)], sum_value=weighted)
    return family


def _saved(stats: dict[str, Any]) -> int:
    return int(stats["conventional_bytes"] - stats["state_bytes"])


def make_registry(service: Service) -> CollectorRegistry:
    """A registry that holds this server's metrics and nothing of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_EngineCollector(service))
    for histogram in service.meters.histograms:
        registry.register(histogram)
    return registry


def prometheus_text(registry: CollectorRegistry) -> bytes:
    """The text form."""
    return generate_latest(registry)
