"""/metrics, /perf_metrics and the status page: the numbers are the engine's, and the page shows them in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.harness import bench
from tests.server.harness import NAME, QWEN, live, over_asgi, service
from tests.server.scripted import serving
from trtllm_replayssm import LLM, MTPDecodingConfig
from trtllm_replayssm.runtime.scheduler.times import RequestTimes
from trtllm_replayssm.runtime.server.service import Service

BODY = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 30, "detokenize": False, "ignore_eos": True}


def samples(text: str) -> dict[str, float]:
    """Sample -> value; labels in the key."""
    return {
        sample.name + "".join(f"[{k}={v}]" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(server: Service, *bodies: dict[str, object]) -> dict[str, float]:
    async def talk(client: httpx.AsyncClient) -> str:
        for body in bodies:
            await client.post("/v1/completions", json=body)
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        assert (await client.get("/prometheus/metrics")).text == response.text
        return response.text

    return samples(over_asgi(server, talk))


def test_memory_is_told_in_bytes_as_the_session_allocated_it() -> None:
    with LLM(QWEN, max_seq_len=64, max_batch_size=3) as llm:
        now = over_asgi(service(llm), lambda client: client.get("/status.json")).json()
        pools = llm._engine.session.pools  # type: ignore[attr-defined]
        states = [*pools.windows.values(), *(t for layer in pools.ssm.values() for t in layer.tensors())]
        allocated = sum(t.numel() * t.element_size() for t in states)
        keys = sum(t.numel() * t.element_size() for layer in pools.kv.values() for t in layer.tensors())
    assert now["state_memory_bytes"] == pytest.approx(allocated, rel=0.01)
    assert now["kv_memory_bytes"] == pytest.approx(keys, rel=0.05)  # beside it, room for drafts past the last position
    assert now["prefix_bytes"] == 0


def test_counters_are_the_engines_and_latencies_the_servers() -> None:
    with serving(bench("mtp")) as server:
        before, after = scrape(server), scrape(server, BODY, {**BODY, "n": 2, "temperature": 1}, {**BODY, "n": 99})
        stats = server.llm.stats()
        for name in ("steps", "prompt_tokens", "output_tokens", "decode_rows", "drafted_tokens", "accepted_tokens",
                     "flushes", "state_bytes", "conventional_bytes"):  # fmt: skip
            assert before[f"replayssm_{name}_total"] == 0 and after[f"replayssm_{name}_total"] == stats[name] > 0
        assert after["replayssm_output_tokens_total"] == 90
        assert after["trtllm_request_success_total[finish_reason=length]"] == 3
        assert after["replayssm_acceptance_length"] == pytest.approx(stats["mean_acceptance_length"])
        assert after["replayssm_state_bytes_saved"] == stats["conventional_bytes"] - stats["state_bytes"]  # type: ignore[operator]
        rows = "replayssm_accepted_tokens_per_row"
        assert after[f"{rows}_bucket[le=+Inf]"] == after[f"{rows}_count"] == stats["decode_rows"]
        assert after[f"{rows}_sum"] == 90 - 3  # the first token of each choice comes from its prompt
        for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency", "time_per_output_token"):
            assert after[f"trtllm_{name}_seconds_count"] == 2 and after[f"trtllm_{name}_seconds_sum"] > 0
        wait, first, total = (
            after[f"trtllm_{name}_seconds_sum"]
            for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency")
        )
        assert wait < first < total
        idle = {"requests_running": 0, "requests_waiting": 0, "slots_used": 0, "slots": 4, "kv_cache_utilization": 0}
        assert {name: after[f"replayssm_{name}"] for name in idle} == idle


def test_the_queue_time_ends_with_the_first_slot_and_the_first_token_stays_the_first() -> None:
    times = RequestTimes()
    times = times.after_admission().after_token()
    first = (times.admitted, times.first_token)
    times = times.after_admission().after_token()  # after a preemption
    assert (times.admitted, times.first_token) == first and times.finished is None


def test_two_servers_of_one_process_have_numbers_of_their_own() -> None:
    with serving(bench()) as one, serving(bench()) as other:
        assert scrape(one, BODY)["replayssm_steps_total"] > 0
        assert scrape(other)["replayssm_steps_total"] == 0
        assert "trtllm_e2e_request_latency_seconds_count" in scrape(other)


def test_perf_metrics_are_handed_out_once_in_order() -> None:
    with serving(bench()) as server:

        async def talk(client: httpx.AsyncClient) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
            for tokens in (3, 5):
                await client.post("/v1/completions", json={**BODY, "max_tokens": tokens})
            return (await client.get("/perf_metrics")).json(), (await client.get("/perf_metrics")).json()

        first, again = over_asgi(server, talk)
        assert [entry["completion_tokens"] for entry in first] == [3, 5] and again == []


def test_the_status_page_needs_no_other_file_and_no_other_host() -> None:
    with serving(bench()) as server:
        page = over_asgi(server, lambda client: client.get("/"))
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"(src|href)=|https?:|@import|url\(", page.text)


def test_the_status_page_shows_the_numbers_in_a_browser(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    with LLM(QWEN, max_seq_len=256, speculative_config=MTPDecodingConfig(max_draft_len=2)) as llm:
        server = service(llm)
        with live(server) as url:
            body = {"model": NAME, "prompt": "The history of the", "max_tokens": 40, "temperature": 0}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
            flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            flags += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=4000", "--dump-dom"]
            command = [browser, *flags, f"{url}/"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        stats = llm.stats()
    assert done.returncode == 0, done.stderr

    def shown(name: str) -> str:
        found = re.search(rf'id="{name}"[^>]*>([^<]*)<', done.stdout)
        assert found is not None, done.stdout
        return found[1]

    assert (shown("model"), shown("state"), shown("batch"), shown("queue")) == (NAME, "running", "0 / 8", "0")
    assert shown("acceptance") == f"{stats['mean_acceptance_length']:.2f}"
    assert shown("drafts") == f"{stats['accepted_tokens']} of {stats['drafted_tokens']} drafts"
    assert float(shown("flush")) > 0 and shown("saved").endswith("MiB") and shown("ended") == "1"
    assert shown("slots") == "0 of 8 slots, 0 positions"
