"""examples/ray_serve with two replicas on this machine: one text everywhere, and prefixes stay where they are."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.paths import EXAMPLES

pytest.importorskip("ray", reason="needs the extra `ray`")
httpx = pytest.importorskip("httpx")

MODEL = EXAMPLES / "qwen3_5-tiny-nvfp4"
CONFIG = "max_batch_size: 2\nmax_seq_len: 256\nkv_cache_config: {tokens_per_block: 16, host_cache_size: 200000000}\n"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "config.yaml").write_text(CONFIG)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = (
        "import sys, time\nsys.path.insert(0, sys.argv[1])\nimport ray\nfrom ray import serve\n"
        "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)\n"
        "serve.start(http_options={'host': '127.0.0.1', 'port': int(sys.argv[2])})\nimport app\n"
        "serve.run(app.build({'model': sys.argv[3], 'config': sys.argv[4], 'replicas': '2'}))\n"
        "print('ready', flush=True)\nsys.stdin.read()\nserve.shutdown()\nray.shutdown()\n"
    )
    ours = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    # Ray kills a proxy that is not ready within 5 s three times in a row; busy cores need longer.
    ours |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
    env = {**os.environ, **ours, "PYTHONPATH": str(EXAMPLES / "ray_serve")}
    arguments = [str(EXAMPLES / "ray_serve"), str(port), str(MODEL), str(folder / "config.yaml")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], cwd=folder, env=env, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
        try:
            assert process.stdout is not None and process.stdin is not None
            lines = iter(process.stdout.readline, "")
            assert any(line.strip() == "ready" for line in lines), (folder / "log").read_text()[-3000:]
            yield f"http://127.0.0.1:{port}"
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def complete(url: str, prompt: str, **fields: object) -> tuple[int, str]:
    """(replica, text) of one greedy completion."""
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return int(response.headers["x-replica"]), response.json()["choices"][0]["text"]


def counters(url: str, replica: int) -> dict[str, float]:
    return httpx.get(f"{url}/status.json", headers={"x-replica": str(replica)}, timeout=60).json()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_turns_of_a_conversation_meet_on_one_replica_and_hit_its_prefix_cache(url: str) -> None:
    begin = "The history of the town is told in many ways, and the first of them goes like this: "
    homes = set()
    for opening in ("One. ", "Two. ", "Three. ", "Four. ", "Five. ", "Six. "):
        text, replicas = opening + begin * 3, []
        for _ in range(3):
            replica, answer = complete(url, text)
            replicas.append(replica)
            text += answer + " And then "
        assert len(set(replicas)) == 1
        homes.add(replicas[0])
    assert homes == {0, 1}
    assert all(counters(url, replica)["prefix_hits"] >= 2 for replica in homes)


@pytest.mark.slow
def test_both_replicas_give_the_same_text_and_streams_arrive_in_parts(url: str) -> None:
    prompt = "To install a package on a Debian system, you should"
    body = {"model": MODEL.name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    texts = []
    for replica in ("0", "1"):
        response = httpx.post(f"{url}/v1/completions", json=body, headers={"x-replica": replica}, timeout=120)
        assert response.headers["x-replica"] == replica
        texts.append(response.json()["choices"][0]["text"])
    assert texts[0] == texts[1] != ""
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and len(lines) > 3
    chunks = [json.loads(line)["choices"] for line in lines[:-1]]
    assert "".join(choices[0]["text"] for choices in chunks if choices) == texts[0]


@pytest.mark.slow
def test_errors_come_through_and_an_unknown_replica_is_refused(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json={"model": MODEL.name, "prompt": "a", "best_of": 3}, timeout=60)
    assert response.status_code == 400 and "best_of" in response.text
    assert httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"] == MODEL.name
    assert httpx.get(f"{url}/health", headers={"x-replica": "2"}, timeout=60).status_code == 400


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_generation(url: str) -> None:
    body = {"model": MODEL.name, "prompt": "1", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers={"x-replica": "0"}, timeout=60) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 30
    while counters(url, 0)["running"] and time.monotonic() < deadline:
        time.sleep(0.2)
    now = counters(url, 0)
    assert now["running"] == 0 and now["finished"].get("cancelled") == 1  # type: ignore[attr-defined]
