"""Bounds on a JSON schema that a client sends, before anything works on it."""

from __future__ import annotations

import json

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.server.grammar_worker import ANY_OBJECT
from trtllm_replayssm.runtime.server.keywords import require_kept
from trtllm_replayssm.runtime.server.protocol.common import ResponseFormat

MAX_DEPTH = 64
MAX_NODES = 1 << 13  # values of any kind; what they cost to compile is bounded by time


def is_guided(wanted: ResponseFormat | None) -> bool:
    """Whether a response format restricts the text."""
    return wanted is not None and wanted.type != "text"


def schema_text(wanted: ResponseFormat, limit: int) -> str:
    """The schema of a json_object or json_schema format as text of at most `limit` bytes. Raises RequestError."""
    if wanted.type == "json_object":
        return ANY_OBJECT
    if wanted.json_schema is None:
        raise RequestError("request", "response_format", expected="json_schema beside its type", got="none")
    schema = wanted.json_schema.schema_
    _require_small(schema)
    require_kept(schema)
    text = json.dumps(schema)
    if len(text) > limit:
        raise RequestError("request", "response_format", expected=f"at most {limit} bytes", got=len(text))
    return text


def _require_small(value: object) -> None:
    """Raise RequestError for too many levels or values; without recursion, and without reading on."""
    seen, todo = 0, [(value, 1)]
    while todo:
        item, level = todo.pop()
        seen += 1
        if level > MAX_DEPTH:
            raise RequestError("request", "response_format", expected=f"at most {MAX_DEPTH} levels", got="more")
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        if seen + len(todo) + len(children) > MAX_NODES:
            raise RequestError("request", "response_format", expected=f"at most {MAX_NODES} values", got="more")
        todo.extend((child, level + 1) for child in children)
