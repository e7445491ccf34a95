"""Replay a JSON-lines data set in trtllm-bench's form against a running server and report throughput and latencies.

Each line: {"task_id": 1, "prompt": "text", "output_tokens": 128}, or "input_ids" instead of "prompt".
Run: python examples/serve/replay.py http://127.0.0.1:8000 data.jsonl --concurrency 16
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def requests_of(path: Path, model: str, *, keep_going: bool) -> list[dict[str, Any]]:
    """Request bodies of a data set; keep_going: generate all output_tokens, whatever the model's end token says."""
    bodies = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        prompt = entry.get("input_ids", entry.get("prompt"))
        if prompt is None or "output_tokens" not in entry:
            raise SystemExit(f"{path}:{number}: expected prompt or input_ids, and output_tokens, got {sorted(entry)}")
        bodies.append(
            {
                "model": model, "prompt": prompt, "max_tokens": entry["output_tokens"], "temperature": 0,
                "ignore_eos": keep_going, "stream": True, "stream_options": {"include_usage": True},
            }
        )  # fmt: skip
    return bodies


class Server:
    """A server's address."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 8000
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def open(self, method: str, path: str, body: object = None) -> tuple[http.client.HTTPConnection, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        connection.request(method, path, None if body is None else json.dumps(body), self.headers)
        return connection, connection.getresponse()

    def model(self) -> str:
        try:
            connection, response = self.open("GET", "/v1/models")
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise SystemExit(f"replay: expected a server at {self.host}:{self.port}, got {error}") from error
        connection.close()
        if response.status != 200:
            raise SystemExit(f"replay: /v1/models: expected status 200, got {response.status}: {text[:200].decode()}")
        return str(json.loads(text)["data"][0]["id"])

    def run(self, body: dict[str, Any]) -> dict[str, Any]:
        """One streamed request -> its times in seconds and its token counts, or the error."""
        begin = time.perf_counter()
        try:
            connection, response = self.open("POST", "/v1/completions", body)
        except (OSError, http.client.HTTPException) as error:
            return {"error": f"no answer: {error}"}
        try:
            if response.status != 200:
                return {"error": f"{response.status}: {response.read().decode()[:200]}"}
            first, usage = None, {}
            for raw in response:
                line = raw.decode().strip()
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return {"error": chunk["error"]["message"]}
                if chunk["choices"] and first is None:
                    first = time.perf_counter() - begin
                usage = chunk.get("usage") or usage
            return {"first": first, "total": time.perf_counter() - begin, "tokens": usage.get("completion_tokens", 0)}
        finally:
            connection.close()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed: p50 of two is the smaller."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--api-key")
    parser.add_argument("--stop-at-eos", action="store_true", help="let the model end a text before output_tokens")
    arguments = parser.parse_args()
    server = Server(arguments.url, arguments.api_key)
    bodies = requests_of(arguments.dataset, server.model(), keep_going=not arguments.stop_at_eos)
    begin = time.perf_counter()
    with ThreadPoolExecutor(arguments.concurrency) as pool:
        results = list(pool.map(server.run, bodies))
    seconds = time.perf_counter() - begin
    good = [result for result in results if "error" not in result]
    failed = len(results) - len(good)
    report: dict[str, Any] = {"requests": len(results), "failed": failed, "seconds": round(seconds, 3)}
    if good:
        tokens = sum(result["tokens"] for result in good)
        report |= {"output_tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)}
        for name in ("first", "total"):
            times = [result[name] or 0.0 for result in good]
            report[f"{name}_seconds"] = {f"p{s}": round(percentile(times, s / 100), 4) for s in (50, 90, 99)}
    print(json.dumps(report, indent=2))
    for result in results:
        if "error" in result:
            sys.stderr.write(f"{result['error']}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
