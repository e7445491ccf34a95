"""One replica: an LLM with a prefix cache behind the product's own HTTP application, called without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.server.app import make_app
from trtllm_replayssm.runtime.server.launch import resolve
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.server.settings import ServerSettings
from trtllm_replayssm.runtime.text.chat_template import load_chat_template


class Replica:
    """Holds one engine; Ray Serve runs it in a process of its own."""

    def __init__(self, model: str, config: dict[str, Any], api_key: str | None = None) -> None:
        """model: checkpoint directory. config: as the YAML file of `trtllm-replayssm serve --config`.

        api_key: asked of every request that generates or reads tokens, None: of none.
        """
        cache = {"enable_block_reuse": True, **config.get("kv_cache_config", {})}
        launch = resolve({**config, "kv_cache_config": cache})
        settings = ServerSettings(model_name=Path(model).resolve().name, limits=launch.limits, api_key=api_key)
        self.llm = LLM(model, **launch.options)
        self.service = Service(self.llm, settings, load_chat_template(model))
        self.app = make_app(self.service)

    async def capacity(self) -> int:
        """Sequences that run at once."""
        return self.llm.load().max_batch_size

    async def check_health(self) -> None:
        """Ray Serve starts the replica anew when this raises: an engine that failed does not come back by itself."""
        if self.llm.failure is not None:
            raise self.llm.failure

    async def call(
        self, method: str, path: str, query: bytes, headers: dict[str, str], body: bytes
    ) -> AsyncIterator[Any]:
        """Run one HTTP request -> its status and headers, then the parts of its body as they come.

        When the caller stops reading, the application sees its client leave and aborts the generation.
        """
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        left = asyncio.Event()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            request = next(requests, None)
            if request is None:
                await left.wait()
            return request or {"type": "http.disconnect"}

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": query, "root_path": "", "client": None,
            "server": None, "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
        }  # fmt: skip
        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    names = {k.decode("latin-1"): v.decode("latin-1") for k, v in message["headers"]}
                    yield message["status"], names
                elif message.get("body"):
                    yield message["body"]
        finally:
            left.set()
        await task
