"""`serve` and `chat` as commands, a shell with curl, the replay script, and SIGTERM in the middle of a load."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.paths import EXAMPLES
from tests.server.harness import (
    COMMAND,
    ENDLESS_POSITIONS,
    NAME,
    QWEN,
    SMALLEST,
    Process,
    endless_checkpoint,
    free_port,
    process,
    service,
    wait_for,
)
from trtllm_replayssm.cli import main
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.server.serve import DrainingServer, require_address, uvicorn_config
from trtllm_replayssm.runtime.server.settings import ServerSettings

KEY = "key of the test"
CONFIG = "speculative_config: {decoding_type: MTP, max_draft_len: 3}\nreplayssm: {window: 8}\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "key").write_text(KEY + "\n")
    flags = ["--max_seq_len", "256", "--config", str(folder / "config.yaml"), "--api_key_file", str(folder / "key")]
    with process(QWEN, *flags, "--enable_chunked_prefill", "--log_level", "warning") as server:
        yield server


def run(*arguments: str, turns: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=turns, capture_output=True, text=True, timeout=120, check=False
    )


def chat(target: str, turns: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return run("chat", target, *flags, turns=turns)


def test_the_configuration_file_acts(served: Process) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": NAME, "prompt": "The history of the", "max_tokens": 20, "temperature": 0}
    assert httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    status = httpx.get(f"{served.url}/status.json").json()
    assert status["drafted_tokens"] > 0 and status["flushes"] > 0


def test_a_shell_script_with_curl_alone_reaches_every_endpoint(served: Process) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    script = [str(EXAMPLES / "serve" / "curl.sh"), served.url, KEY]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("== ") == 17 and "data: [DONE]" in done.stdout and "replayssm_steps_total" in done.stdout
    headers = {"Authorization": f"Bearer {KEY}"}
    for path in httpx.get(f"{served.url}/openapi.json", headers=headers).json()["paths"]:
        assert f" {path.replace('{model}', NAME)}\n" in done.stdout  # every endpoint there is
    wrong = subprocess.run([*script[:2], "wrong"], capture_output=True, text=True, timeout=120, check=False)
    assert wrong.returncode != 0 and "invalid_api_key" in wrong.stdout


def test_a_data_set_of_json_lines_is_replayed(served: Process, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"task_id": i, "prompt": f"{i} and", "output_tokens": 4 + i} for i in range(8)]
    lines.append({"task_id": 8, "input_ids": [5, 6, 7], "output_tokens": 9})
    lines.append({"task_id": 9, "prompt": "one\u2028line\u0085", "output_tokens": 4})
    text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "data.jsonl").write_text(text, encoding="utf-8", newline="")
    command = [sys.executable, str(EXAMPLES / "serve" / "replay.py"), served.url, str(tmp_path / "data.jsonl")]
    done = subprocess.run([*command, "--api-key", KEY], capture_output=True, text=True, timeout=120, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["failed"] == 0 and report["requests"] == 10
    assert report["output_tokens"] == sum(line["output_tokens"] for line in lines)
    assert report["total_seconds"]["p99"] >= report["first_seconds"]["p50"] > 0


def test_chat_with_a_server_and_with_a_checkpoint_say_the_same(served: Process) -> None:
    turns = "Hello\n\nAnd you?\n/reset\nHello\n/help\n/quit\nnever sent\n"
    flags = ("--max-tokens", "12", "--temperature", "0", "--system", "Be brief.")
    remote, local = chat(served.url, turns, "--api-key", KEY, *flags), chat(str(QWEN), turns, *flags)
    assert remote.returncode == local.returncode == 0, remote.stderr + local.stderr
    assert remote.stdout == local.stdout
    assert remote.stdout.count("/reset") == 1  # the help
    first = remote.stdout[: remote.stdout.index("\n")]
    assert first and remote.stdout.count(first) >= 2  # the conversation began anew


def test_chat_reports_what_the_server_refuses_and_goes_on(served: Process) -> None:
    done = chat(served.url, "word " * 300 + "\nHello\n", "--api-key", KEY, "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0 and "max_seq_len" in done.stderr and done.stdout.strip()
    denied = chat(served.url, "Hello\n")
    assert denied.returncode == 1 and "401" in denied.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--pp_size", "2"], "pp_size"), (["--port", "99999"], "port"), (["--max_seq_len", "1"], "max_seq_len"),
        (["--max_beam_width", "4"], "max_beam_width"), (["--backend", "tensorrt"], "backend"),
        (["--kv_cache_free_gpu_memory_fraction", "2"], "free_gpu_memory_fraction"),
        (["--max_queue_size", "-1"], "max_queue_size"), (["--api_key", "x", "--api_key_file", "y"], "api_key_file"),
        (["--config", "/nowhere.yaml"], "nowhere.yaml"), (["--tokenizer", "/nowhere"], "tokenizer"),
        (["--kernel_cache", "kernels"], "kernel_cache"),
    ],
)  # fmt: skip
def test_flags_that_cannot_act_end_with_one_line(flags: list[str], named: str, capsys: Any) -> None:
    assert main(["serve", str(SMALLEST), "--port", "0", *flags]) == 1
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if not line.startswith("INFO: ")]
    assert named in line and line.startswith("trtllm-replayssm: ")


def test_a_port_in_use_is_an_error_and_ends_the_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("serve", str(SMALLEST), "--host", "127.0.0.1", "--port", port)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, "found out before the model is loaded"
    assert done.stderr.startswith("trtllm-replayssm: serve: port: ")
    assert f"got 127.0.0.1:{port} (Address already in use)" in done.stderr


def test_an_unknown_host_is_told_before_the_model_is_loaded(capsys: Any) -> None:
    assert main(["serve", str(SMALLEST), "--host", "no-such-host.invalid"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "expected an address to listen on, got no-such-host.invalid:8000 (" in error


def test_every_address_is_one_to_listen_on() -> None:
    for host in ("", "0.0.0.0", "localhost"):
        require_address(ServerSettings(model_name=NAME, host=host, port=free_port()))


def test_a_port_that_is_taken_while_the_model_is_loaded_is_told_with_the_systems_reason() -> None:
    with LLM(SMALLEST, max_seq_len=64) as llm, socket.socket() as taken:
        server = service(llm)
        taken.bind(("127.0.0.1", server.settings.port))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"got 127\.0\.0\.1:{server.settings.port} \(.*already in use"):
            DrainingServer(uvicorn_config(server), server).run()


def generate(url: str, body: dict[str, Any]) -> str:
    """How one request ended: "whole", the status of a refusal, "refused" by the socket, or "cut" without an end."""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            if response.status_code != 200:
                assert "error" in json.loads(response.read())
                return str(response.status_code)
            text = response.read().decode()
    except httpx.ConnectError:
        return "refused"
    if not body.get("stream"):
        return "whole" if json.loads(text)["choices"][0]["finish_reason"] == "length" else "cut"
    if not text.endswith("data: [DONE]\n\n"):
        return "cut"
    return "stopped" if '"error"' in text else "whole"


@pytest.mark.parametrize(("drain_seconds", "tokens"), [(30, 100), (0, 60_000)], ids=["finish", "stop"])
def test_sigterm_under_load_finishes_or_refuses_every_request(tmp_path: Path, drain_seconds: int, tokens: int) -> None:
    (tmp_path / "config.yaml").write_text(f"replayssm: {{limits: {{drain_seconds: {drain_seconds}}}}}\n")
    room = ("--max_seq_len", str(ENDLESS_POSITIONS))
    flags = ("--config", str(tmp_path / "config.yaml"), "--max_batch_size", "4", *room)
    with process(endless_checkpoint(tmp_path), *flags) as server, concurrent.futures.ThreadPoolExecutor(40) as pool:
        body = {"model": NAME, "prompt": [1, 2, 3], "max_tokens": tokens, "detokenize": False, "ignore_eos": True}
        early = [pool.submit(generate, server.url, {**body, "stream": i % 2 == 0}) for i in range(16)]
        wait_for(lambda: httpx.get(f"{server.url}/status.json").json()["waiting"] >= 12, "a queue")
        server.process.send_signal(signal.SIGTERM)
        late = []
        for _ in range(10):
            late.append(pool.submit(generate, server.url, body))
            time.sleep(0.02)
        began = time.monotonic()
        assert server.process.wait(60) == 0
        assert time.monotonic() - began < drain_seconds + 15
        outcomes, refusals = [f.result(60) for f in early], [f.result(60) for f in late]
        logs = server.logs()
    if drain_seconds:
        assert outcomes == ["whole"] * 16
    else:
        assert set(outcomes) <= {"stopped", "503"} and {"stopped", "503"} <= set(outcomes)
    assert set(refusals) <= {"503", "refused"} and (drain_seconds == 0 or "503" in refusals)
    assert "Traceback" not in logs and "stopping" in logs


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    model, flags = endless_checkpoint(tmp_path), ("--max_seq_len", str(ENDLESS_POSITIONS))
    with process(model, *flags) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        body = {"model": NAME, "prompt": [1], "detokenize": False, "ignore_eos": True, "stream": True}
        running = pool.submit(generate, server.url, body)
        wait_for(lambda: httpx.get(f"{server.url}/status.json").json()["running"] == 1, "a request")
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503, "draining")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(15) == 0
        assert running.result(10) == "stopped"


def test_free_ports_are_free() -> None:
    assert free_port() != free_port()
