"""Reads a request's JSON without ever doing more work than the server's limits allow.

Lists, objects, names, values and levels are counted in the bytes before anything is made of them: objects of Python
are many times larger than their text, and checks that collect one error per item take minutes over a body of megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.server.limits import Limits

MAX_DEPTH = 80  # a JSON schema may have 64 levels, and stands inside a few
NAMES_PER_LIST = 4  # a message has three, a JSON schema about as many


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyBounds:
    """Of one body at most: values (items of lists), lists (and objects), names (of objects' members)."""

    values: int
    lists: int
    names: int

    @classmethod
    def of(cls, limits: Limits, max_seq_len: int) -> BodyBounds:
        """What the largest legal request needs: max_prompts prompts of max_seq_len token ids, or body_lists lists."""
        names = NAMES_PER_LIST * limits.body_lists
        return cls(values=limits.max_prompts * max_seq_len + names, lists=limits.body_lists, names=names)


def read_json(data: bytes, bounds: BodyBounds) -> Any:
    """The value of a JSON text (RFC 8259) in UTF-8. Raises RequestError; no name may stand twice in an object."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _refused("JSON in UTF-8", "other bytes") from error
    _check_size(data, bounds)
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise _refused("JSON", str(error)[:100]) from error


def _check_size(data: bytes, bounds: BodyBounds) -> None:
    """Count what stands outside strings. Of a text that is no JSON the counts mean nothing, and refuse it or not."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    _within("strings", data.count(b'"') // 2, bounds.values + bounds.names)
    outside = b"".join(data.split(b'"')[::2])
    _within("lists and objects", outside.count(b"[") + outside.count(b"{"), bounds.lists)
    _within("names in objects", outside.count(b":"), bounds.names)
    _within("values", outside.count(b",") + 1, bounds.values)
    depth = 0
    for byte in outside.translate(None, _NO_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        _within("levels", depth, MAX_DEPTH)


_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")


def _within(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise _refused(f"at most {limit} {what}", f"about {count}")


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(members)
    if len(made) != len(members):
        seen: set[str] = set()
        twice = next(name for name, _ in members if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise RequestError("request", twice[:100], expected="each name once in an object", got="the name twice")
    return made


def _no_number(name: str) -> NoReturn:
    raise _refused("finite numbers", name)


def _refused(expected: str, got: str) -> RequestError:
    return RequestError("request", "body", expected=expected, got=got)


def _require_json(content_type: str) -> None:
    """A web page may send other types to a server on its reader's machine without asking it first."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(
            "HTTP", "Content-Type", expected="application/json", got=kind[:100] or "none",
            hint="With curl: --header 'Content-Type: application/json'",
        )  # fmt: skip


def bounded_route(bounds: BodyBounds) -> type[APIRoute]:
    """A kind of route whose endpoints get bodies through `read_json`."""

    class _Bounded(Request):
        async def json(self) -> Any:
            try:
                return read_json(await self.body(), bounds)
            except RequestError as error:  # the framework lets only this kind through
                raise HTTPException(400) from error

    class _Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                if request.method == "POST":
                    _require_json(request.headers.get("content-type", ""))
                return await handle(_Bounded(request.scope, request.receive))

            return bounded

    return _Route
