"""Request files in trtllm-bench's form: one JSON object a line with task_id, prompt or input_ids, and output_tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import ConfigError

_IDS = ("input_ids", "logits")  # trtllm-bench's older files call the prompt's ids "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One line. prompt: text or token ids; output_tokens: how many tokens it generates, end tokens or not."""

    task_id: int
    prompt: str | Sequence[int]
    output_tokens: int


def read_dataset(path: Path, limit: int | None = None) -> list[BenchRequest]:
    """The requests of a file in order, at most `limit` of them. Raises ConfigError naming the line; OSError."""
    requests: list[BenchRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(requests) == limit:
                break
            if line.strip():
                requests.append(_request(f"{path}, line {number}", line))
    if not requests:
        raise ConfigError("bench throughput", "dataset", expected="at least one request", got=f"none in {path}")
    return requests


def _request(where: str, line: str) -> BenchRequest:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise _error(where, "a JSON object", str(error)) from error
    if not isinstance(data, Mapping):
        raise _error(where, "a JSON object", line[:60])
    for name in ("task_id", "output_tokens"):
        if type(data.get(name)) is not int or data[name] < (name == "output_tokens"):
            raise _error(where, f"{name}: a whole number", repr(data.get(name)))
    return BenchRequest(task_id=data["task_id"], prompt=_prompt(where, data), output_tokens=data["output_tokens"])


def _prompt(where: str, data: Mapping[str, Any]) -> str | list[int]:
    """trtllm-bench prefers ids to text where a line has both."""
    ids = next((data[name] for name in _IDS if data.get(name) is not None), None)
    if ids is None:
        if isinstance(data.get("prompt"), str):
            return str(data["prompt"])
        raise _error(where, "prompt (text) or input_ids", repr(sorted(data)))
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise _error(where, "input_ids: a list of whole numbers", repr(ids)[:60])
    return ids


def _error(where: str, expected: str, got: str) -> ConfigError:
    return ConfigError("bench throughput", where, expected=expected, got=got)
