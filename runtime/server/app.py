"""The ASGI application: routes, and one shape for every error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from trtllm_replayssm import __version__
from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.runtime.server.admin import Admin
from trtllm_replayssm.runtime.server.bounds import BodyBounds, bounded_route
from trtllm_replayssm.runtime.server.chat import Chat
from trtllm_replayssm.runtime.server.completions import Completions
from trtllm_replayssm.runtime.server.errors import describe, error_object, error_response, validation_object
from trtllm_replayssm.runtime.server.guard import Guard
from trtllm_replayssm.runtime.server.protocol.chat import ChatCompletion
from trtllm_replayssm.runtime.server.protocol.common import ErrorBody
from trtllm_replayssm.runtime.server.protocol.completions import Completion
from trtllm_replayssm.runtime.server.protocol.responses import ResponsesResponse
from trtllm_replayssm.runtime.server.responses import Responses
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.server.stream import CLIENT_CLOSED, ClientGoneError

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "a field is wrong", 401: "no valid API key", 404: "no such model", 413: "body too large",
        429: "queue full", 431: "headers too large", 500: "generation failed", 503: "the server is stopping",
    }.items()
}  # fmt: skip


def make_app(service: Service) -> ASGIApp:
    """The application over a service, behind its guard."""
    app = FastAPI(title="trtllm-replayssm", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = bounded_route(BodyBounds.of(service.limits, service.llm.max_seq_len))
    _add_routes(app, service)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ReplaySSMError, _own_error)
    app.add_exception_handler(ClientGoneError, _client_gone)
    return Guard(app, service.limits, service.settings.api_key, lambda: service.gate.stopping)


def _add_routes(app: FastAPI, service: Service) -> None:
    admin = Admin(service)

    def route(method: str, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        app.add_api_route(path, endpoint, methods=[method], responses=_ERRORS, **options)

    route("POST", "/v1/completions", Completions(service).create, response_model=Completion)
    route("POST", "/v1/chat/completions", Chat(service).create, response_model=ChatCompletion)
    route("POST", "/v1/responses", Responses(service).create, response_model=ResponsesResponse)
    route("GET", "/v1/models", admin.models)
    route("GET", "/v1/models/{model:path}", admin.model)
    route("POST", "/tokenize", admin.tokenize)
    route("POST", "/detokenize", admin.detokenize)
    for path, endpoint in (
        ("/health", admin.health), ("/health_generate", admin.health_generate), ("/metrics", admin.metrics),
        ("/prometheus/metrics", admin.metrics), ("/perf_metrics", admin.perf_metrics),
        ("/status.json", admin.status), ("/", admin.page),
    ):  # fmt: skip
        route("GET", path, endpoint, response_model=None)
    route("GET", "/version", admin.version)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for it"
    return error_response(400, validation_object(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    if isinstance(error.__cause__, ReplaySSMError):
        return error_response(*describe(error.__cause__))
    messages = {404: f"no endpoint {request.url.path[:100]}", 405: f"{request.method} is not allowed here"}
    message = messages.get(error.status_code, str(error.detail))
    return error_response(error.status_code, error_object(error.status_code, message), dict(error.headers or {}))


async def _own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ReplaySSMError), "registered for it"
    return error_response(*describe(error))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
