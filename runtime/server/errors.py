"""Errors of HTTP requests, and how every error becomes an OpenAI error object. No error leaves without one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from trtllm_replayssm.errors import CapacityError, RequestError, UnsupportedError

MAX_MESSAGE = 600
RETRY = {"Retry-After": "1"}  # another server, or this one anew, may be there at any moment
INTERNAL = "The server failed to process the request"


class NotFoundError(RequestError):
    """The named thing does not exist: a model, a path."""


class UnauthorizedError(RequestError):
    """The request carries no valid API key."""


class TooLargeError(RequestError):
    """The body or the headers exceed the server's limits."""

    def __init__(self, argument: str, *, limit: int, status: int) -> None:
        """limit in bytes; status: 413 or 431."""
        super().__init__("HTTP", argument, expected=f"at most {limit} bytes", got="more")
        self.status = status


class OverloadedError(CapacityError):
    """The queue is full, or the server is about to stop."""

    def __init__(self, argument: str, *, expected: str, got: object, status: int, retry_after: float) -> None:
        """status: 429 or 503; retry_after in seconds."""
        super().__init__("server", argument, expected=expected, got=got, hint="Try again later")
        self.status = status
        self.retry_after = max(1, math.ceil(retry_after))


class GenerationError(CapacityError):
    """A request that was accepted could not be finished."""

    def __init__(self, reason: str, *, status: int) -> None:
        """status: 500 for a fault, 503 when the server stopped first."""
        super().__init__("generate", "request", expected="an answer", got=reason)
        self.status = status


_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 431: "request_too_large",
}  # fmt: skip
_CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "queue_full", 431: "headers_too_large"}


def error_object(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error object."""
    text = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": text, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def error_response(status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """A JSON response; everything outside ASCII is escaped, lone surrogates too."""
    return Response(json.dumps(content, allow_nan=False), status, headers, media_type="application/json")


def describe(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, error object, headers) of an exception of ours; any other is a plain 500 without its text."""
    if isinstance(error, OverloadedError):
        content = error_object(error.status, str(error), code="server_stopping" if error.status == 503 else None)
        return error.status, content, {"Retry-After": str(error.retry_after)}
    if isinstance(error, (TooLargeError, GenerationError)):
        return error.status, error_object(error.status, str(error)), RETRY if error.status == 503 else {}
    if isinstance(error, UnauthorizedError):
        return 401, error_object(401, str(error)), {"WWW-Authenticate": "Bearer"}
    if isinstance(error, NotFoundError):
        code = "model_not_found" if error.argument == "model" else None
        return 404, error_object(404, str(error), param=error.argument, code=code), {}
    if isinstance(error, (RequestError, UnsupportedError)):
        return 400, error_object(400, str(error), param=error.argument), {}
    return 500, error_object(500, INTERNAL), {}


def validation_object(errors: Sequence[Any]) -> dict[str, Any]:
    """The error object of pydantic's findings about a body: names the field, never echoes its value."""
    first = min(errors, key=lambda e: len(e["loc"])) if errors else {"loc": (), "msg": "invalid", "type": ""}
    path = [part for part in first["loc"] if part != "body"]
    field = str(path[0])[:100] if path and not isinstance(path[0], int) else None
    where = ".".join(str(part)[:100] for part in path[:6]) or "body"
    if first["type"] == "extra_forbidden":
        message = f"{where}: this server has no such field"
    else:
        message = f"{where}: {str(first['msg']).removeprefix('Value error, ')}"
    return error_object(400, message, param=field)
