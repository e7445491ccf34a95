"""Servers for tests: in this process over ASGI, on a free port of 127.0.0.1 in a thread, or as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from tests.paths import EXAMPLES, ROOT
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.server.app import make_app
from trtllm_replayssm.runtime.server.limits import Limits
from trtllm_replayssm.runtime.server.serve import uvicorn_config
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.server.settings import ServerSettings
from trtllm_replayssm.runtime.text.chat_template import ChatTemplate, load_chat_template

QWEN = EXAMPLES / "qwen3_5-tiny-nvfp4"
NEMOTRON = EXAMPLES / "nemotron-tiny-nvfp4"
SMALLEST = ROOT / "tests" / "checkpoints" / "nemotron-dense"
NAME = "tiny"
ENDLESS_POSITIONS = 1 << 16  # no test lasts as long as a sequence of these
COMMAND = (sys.executable, "-c", "import sys; from trtllm_replayssm.cli import main; sys.exit(main())")
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
Result = TypeVar("Result")


def service(llm: LLM, template: ChatTemplate | None = None, *, api_key: str | None = None, **limits: Any) -> Service:
    """A service named NAME."""
    settings = ServerSettings(
        model_name=NAME, host="127.0.0.1", port=free_port(), api_key=api_key, limits=Limits(**limits),
        log_level="warning",
    )  # fmt: skip
    return Service(llm, settings, template)


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def qwen_template() -> ChatTemplate:
    template = load_chat_template(QWEN)
    assert template is not None
    return template


def client_of(server: Service) -> httpx.AsyncClient:
    """A client of the application in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(server)), base_url="http://server", timeout=60)


def over_asgi(server: Service, talk: Callable[[httpx.AsyncClient], Awaitable[Result]]) -> Result:
    """Run one conversation with the application in this process."""

    async def run() -> Result:
        async with client_of(server) as client:
            return await talk(client)

    return asyncio.run(run())


def ask(server: Service, path: str, body: Any) -> httpx.Response:
    """One POST to the application in this process."""
    return over_asgi(server, lambda client: client.post(path, json=body))


def events(text: str) -> list[str]:
    """Data of the server-sent events of a whole stream."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def endless_checkpoint(directory: Path) -> Path:
    """SMALLEST with room for sequences that do not end while a test runs; its attention knows no positions."""
    folder = directory / "endless"
    shutil.copytree(SMALLEST, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": ENDLESS_POSITIONS}))
    return folder


@contextmanager
def live(server: Service) -> Iterator[str]:
    """The server on its port, in a thread; gives its address."""
    runner = uvicorn.Server(uvicorn_config(server))
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: runner.started, "the server to listen")
        yield f"http://127.0.0.1:{server.settings.port}"
    finally:
        runner.should_exit = True
        thread.join(20)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.005)


@dataclass
class Process:
    """A server of the command line."""

    process: subprocess.Popen[str]
    url: str

    def logs(self) -> str:
        """Its output, once it has ended."""
        return self.process.communicate(timeout=60)[0]


@contextmanager
def process(model: Path, *flags: str) -> Iterator[Process]:
    """`trtllm-replayssm serve` as a process, ready to answer; killed at the end if it still runs."""
    port = free_port()
    command = [*COMMAND, "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served_model_name", NAME, *flags]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        if running.poll() is not None:
            raise AssertionError(f"the server ended: {running.communicate()[0]}")
        try:
            return httpx.get(f"{url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(ready, "the server to answer", 60)
        yield Process(running, url)
    finally:
        if running.poll() is None:
            running.kill()
        if running.stdout is not None and not running.stdout.closed:
            running.communicate()
