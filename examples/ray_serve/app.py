"""Data-parallel replicas behind one address, through Ray Serve.

    pip install -e '.[serve,ray]'    # in a checkout
    cd examples/ray_serve; serve run --working-dir . app:build model=/path/to/checkpoint replicas=2

Each replica is a deployment of its own, so that the router, and not Ray's load balancer, decides who gets a request:
see `routing`. `config=FILE.yaml` takes the same file as `trtllm-replayssm serve --config`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from replica import Replica
from routing import REPLICA_HEADER, affinity_key, choose, limited_body, rank
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from trtllm_replayssm.runtime.server.launch import read_yaml, resolve

QUEUE = 1024  # requests in one replica: its own server refuses with 429 before


@serve.deployment(max_ongoing_requests=QUEUE, ray_actor_options={"num_cpus": 0})
class Router:
    """Forwards each request to the replica that has its beginning, and counts what each one has to do."""

    def __init__(self, body_bytes: int, *replicas: DeploymentHandle) -> None:
        """body_bytes: of one request at most."""
        self.body_bytes = body_bytes
        self.replicas = [handle.options(stream=True) for handle in replicas]
        self.loads = [0] * len(replicas)
        self.capacity: int | None = None
        self._ask = replicas[0]

    async def __call__(self, request: Request) -> Response:
        """One HTTP request."""
        body = await limited_body(request.stream(), self.body_bytes)
        if body is None:
            error = {"message": f"body: expected at most {self.body_bytes} bytes", "type": "request_too_large"}
            return JSONResponse({"error": {**error, "param": None, "code": "request_too_large"}}, 413)
        if self.capacity is None:
            self.capacity = await self._ask.capacity.remote()
        headers = dict(request.headers)
        asked = headers.get(REPLICA_HEADER)
        if asked is None:
            order = rank(affinity_key(headers, body), len(self.replicas))
            chosen = choose(order, self.loads, self.capacity)
        elif asked.isdecimal() and int(asked) < len(self.replicas):
            chosen = int(asked)
        else:
            return JSONResponse({"error": {"message": f"{REPLICA_HEADER}: expected 0..{len(self.replicas) - 1}"}}, 400)
        self.loads[chosen] += 1
        parts = self._parts(chosen, request, headers, body)
        try:
            status, names = await anext(parts)
        except BaseException:
            await parts.aclose()
            raise
        names.pop("content-length", None)
        return StreamingResponse(parts, status, {**names, REPLICA_HEADER: str(chosen)})

    async def _parts(self, chosen: int, request: Request, headers: dict[str, str], body: bytes) -> AsyncIterator[Any]:
        """Status and headers, then the body; tells the replica when the client leaves before the end."""
        query = request.url.query.encode()
        answer = self.replicas[chosen].call.remote(request.method, request.url.path, query, headers, body)
        try:
            async for part in answer:
                yield part
        finally:
            self.loads[chosen] -= 1
            answer.cancel()


def build(args: dict[str, str]) -> serve.Application:
    """The application that `serve run app:build model=... replicas=... config=... api_key_file=...` starts."""
    config = read_yaml(args["config"]) if "config" in args else {}
    api_key = Path(args["api_key_file"]).read_text(encoding="utf-8").strip() if "api_key_file" in args else None
    gpus = float(args.get("gpus", 0))
    options: dict[str, Any] = {"max_ongoing_requests": QUEUE, "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus}}
    replicas = [
        serve.deployment(Replica).options(name=f"replica-{i}", **options).bind(args["model"], config, api_key)
        for i in range(int(args.get("replicas", 2)))
    ]
    return Router.bind(resolve(config).limits.body_bytes, *replicas)
