"""64 streams at once, 2,000 requests, a tenth of them leaving early and a twentieth malformed, on two CPU cores.

Prompts are text or token ids, some with stop strings or several choices; malformed are wrong fields and broken JSON.

Each answer must be the one that its prompt gets alone; afterwards no slot is held and memory has not grown. Greedy
answers of prompts whose top two candidates come closer than NOISE anywhere are left out: there the text may depend on
the batch.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.bundled import NOISE
from tests.server.harness import NAME, SMALLEST, process, wait_for
from tests.server.scripted import byte_backend
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.runtime.llm import CompletionOutput

REQUESTS, STREAMS, PROMPTS = 2000, 64, 48
LEAVING, MALFORMED = 0.10, 0.05
GROWTH_BYTES = 24 << 20  # allocator noise; one leaked output per request would be more, one leaked slot much more
FILL_BYTES = 64 << 20  # what the first requests bring in: code, buffers of kernels and connections
LETTERS = "abcdefghij klmno"
CONFIG = """
max_batch_size: 16
max_seq_len: 128
replayssm: {drafter: ngram, draft_len: 3, prefill_chunk: 16}
"""
BROKEN: list[dict[str, Any]] = [
    {"prompt": [9999]}, {"max_tokens": -1}, {"n": "many"}, {"unknown": 1}, {"prompt": []}, {"prompt": [1] * 400},
    {"temperature": "hot"}, {"stop": ["x"] * 99}, {"logprobs": 99},
]  # fmt: skip


DAMAGED = (b"", b"{", b'{"model": "tiny", "prompt": [1,]}', b'{"model": NaN}', b"\xff\xfe", b"[1, 2]", b"null")


@dataclass
class Case:
    """A prompt, its settings, and what each of its choices gets alone: token ids, or a text."""

    body: dict[str, Any]
    expected: list[Any]


@dataclass
class Tally:
    """What happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def checkpoint(directory: Path) -> Path:
    """SMALLEST with a tokenizer of bytes."""
    folder = directory / "model"
    shutil.copytree(SMALLEST, folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    return folder


def solo_runs(model: Path) -> list[Case]:
    """Prompts of 1..60 tokens with their answers, one at a time and without drafts; half of them are text."""
    rng, cases = random.Random(4), []
    with LLM(model, max_batch_size=1, max_seq_len=128) as llm:
        while len(cases) < PROMPTS:
            ids = [rng.randrange(256) for _ in range(rng.choice((1, 3, 15, 16, 17, 40, 60)))]
            text, count = len(cases) % 2 == 0, rng.randrange(4, 22)
            prompt: Any = "".join(LETTERS[i % len(LETTERS)] for i in ids) if text else ids
            settings: dict[str, Any] = {"max_tokens": count, "temperature": 0.0, "detokenize": text}
            output = solo(llm, prompt, settings)
            best = [sorted((e.logprob for e in entry.values()), reverse=True) for entry in output.logprobs or ()]
            if any(first - second <= NOISE for first, second, *_ in best):
                continue
            if text and len(cases) % 4 == 0 and len(output.text) > 3:
                settings["stop"] = [output.text[2:4], "never"]
                output = solo(llm, prompt, settings)
            n = 1 + (len(cases) % 3 == 0)
            body = {"model": NAME, "prompt": prompt, "n": n, **settings}
            cases.append(Case(body, [output.text if text else output.token_ids] * n))
    return cases


def solo(llm: LLM, prompt: Any, settings: dict[str, Any]) -> CompletionOutput:
    """The one choice of a request that runs alone."""
    result = llm.generate(prompt, SamplingParams(**settings, logprobs=2), use_tqdm=False)
    return result.outputs[0]  # type: ignore[union-attr]


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


async def whole(client: httpx.AsyncClient, case: Case, stream: bool) -> list[Any]:
    """What each choice of a request that stays to the end is given; a stream must end as streams do."""
    name = "text" if case.body["detokenize"] else "token_ids"
    if not stream:
        response = await client.post("/v1/completions", json=case.body)
        assert response.status_code == 200, response.text
        return [choice[name] for choice in response.json()["choices"]]
    found: list[Any] = [[] if name == "token_ids" else "" for _ in range(case.body["n"])]
    data = ""
    async with client.stream("POST", "/v1/completions", json={**case.body, "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line:
                continue
            assert line.startswith("data: ") and data != "[DONE]"
            data = line.removeprefix("data: ")
            for choice in json.loads(data)["choices"] if data != "[DONE]" else ():
                found[choice["index"]] += choice[name]
    assert data == "[DONE]"
    return found


async def leave(client: httpx.AsyncClient, case: Case, rng: random.Random) -> None:
    """Go away before the end: after some chunks, or after some time without reading."""
    if rng.random() < 0.5:
        async with client.stream("POST", "/v1/completions", json={**case.body, "stream": True}) as response:
            left = rng.randrange(3)
            async for _ in response.aiter_lines():
                if left == 0:
                    return
                left -= 1
        return
    task = asyncio.ensure_future(client.post("/v1/completions", json=case.body))
    await asyncio.sleep(rng.random() * 0.3)
    task.cancel()
    await asyncio.wait({task})


async def one(client: httpx.AsyncClient, cases: list[Case], rng: random.Random, tally: Tally) -> None:
    """One request of the mix."""
    case, kind = rng.choice(cases), rng.random()
    if kind < MALFORMED:
        content = rng.choice(DAMAGED) if rng.random() < 0.4 else None
        if content is None:
            response = await client.post("/v1/completions", json={**case.body, **rng.choice(BROKEN)})
        else:
            headers = {"Content-Type": "application/json"}
            response = await client.post("/v1/completions", content=content, headers=headers)
        tally.outcomes[f"malformed {response.status_code}"] += 1
    elif kind < MALFORMED + LEAVING:
        await leave(client, case, rng)
        tally.outcomes["left"] += 1
    else:
        ids = await whole(client, case, rng.random() < 0.7)
        tally.outcomes["whole"] += 1
        if ids != case.expected:
            tally.wrong.append(f"{case.body}: {ids} instead of {case.expected}")


async def load(url: str, pid: int, cases: list[Case], tally: Tally) -> None:
    """All requests, STREAMS at a time; memory and queue times every hundred."""
    todo = iter(range(REQUESTS))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=STREAMS)

    async def worker(client: httpx.AsyncClient, seed: int) -> None:
        rng = random.Random(seed)
        for number in todo:
            await one(client, cases, rng, tally)
            if number % 100 == 99:
                tally.memory.append(memory(pid))
                recent = (await client.get("/perf_metrics")).json()
                tally.waits += [entry["perf_metrics"]["queue_seconds"] for entry in recent]

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(worker(client, seed) for seed in range(STREAMS)))


@pytest.mark.slow
def test_a_mixed_load_leaks_no_slot_crosses_no_stream_and_keeps_memory_flat(
    tmp_path: Path, record_property: Any
) -> None:
    model = checkpoint(tmp_path)
    cases, tally = solo_runs(model), Tally()
    assert {bool(case.body.get("stop")) for case in cases} == {case.body["n"] == 2 for case in cases} == {True, False}
    (tmp_path / "config.yaml").write_text(CONFIG)
    with process(model, "--config", str(tmp_path / "config.yaml"), "--log_level", "error") as server:
        before = memory(server.process.pid)
        asyncio.run(load(server.url, server.process.pid, cases, tally))

        def idle() -> bool:
            now = httpx.get(f"{server.url}/status.json").json()
            return now["free_slots"] == now["slots"] == 16 and now["waiting"] == now["running"] == 0

        wait_for(idle, "all slots")
        status = httpx.get(f"{server.url}/status.json").json()
    waits = sorted(tally.waits)
    p99 = waits[int(0.99 * len(waits))]
    record_property("p99_queue_wait_seconds", p99)
    print(f"queue wait p50 {waits[len(waits) // 2]:.3f} s, p99 {p99:.3f} s")
    print(f"memory before {before} bytes")
    print(f"memory after 500 requests {tally.memory[4]} bytes, after all {tally.memory[-1]}")
    print(f"{dict(tally.outcomes)}; accepted {status['accepted_tokens']} of {status['drafted_tokens']} drafts")
    assert tally.wrong == []
    assert sum(tally.outcomes.values()) == REQUESTS
    assert {name for name in tally.outcomes if name.startswith("malformed")} == {"malformed 400"}
    assert tally.outcomes["left"] > REQUESTS * LEAVING / 2
    assert tally.outcomes["malformed 400"] > REQUESTS * MALFORMED / 2
    assert status["finished"].get("cancelled", 0) > 0 and status["accepted_tokens"] > 0
    assert max(tally.memory) - before < FILL_BYTES
    assert max(tally.memory[5:]) - max(tally.memory[:5]) < GROWTH_BYTES
