"""Endpoints about the server and its tokens: models, tokenizer, health, version, metrics, status page."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from trtllm_replayssm import __version__
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.server.errors import error_object
from trtllm_replayssm.runtime.server.metrics import make_registry, prometheus_text, snapshot
from trtllm_replayssm.runtime.server.protocol.common import ModelCard, ModelList
from trtllm_replayssm.runtime.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from trtllm_replayssm.runtime.server.readiness import Readiness
from trtllm_replayssm.runtime.server.sampling import within
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.server.stream import unless_gone

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PROBE_SECONDS = 30.0


class Admin:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._readiness = Readiness(service, PROBE_SECONDS)
        self._registry = make_registry(service)
        self._page = resources.files(__package__ or "").joinpath("status.html").read_text(encoding="utf-8")

    async def models(self) -> ModelList:
        """The one model of this server."""
        return ModelList(data=[self._card()])

    async def model(self, model: str) -> ModelCard:
        """The card of a model."""
        self._service.check_model(model)
        return self._card()

    def _card(self) -> ModelCard:
        service = self._service
        return ModelCard(
            id=service.settings.model_name, created=service.created, max_model_len=service.llm.max_seq_len
        )

    async def tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        service = self._service
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("request", "prompt", expected="either prompt or messages", got="both or neither")
        text, field, special = body.prompt or "", "prompt", body.add_special_tokens
        if body.messages is not None:
            messages = [message.plain() for message in body.messages]
            text = await service.render(messages, add_generation_prompt=body.add_generation_prompt, extra=None)
            field, special = "messages", False
        ids = await service.encode(text, field=field, add_special_tokens=special)
        within("tokens of the text", len(ids), service.max_tokens_of_text)
        return TokenizeResponse(tokens=ids, count=len(ids), max_model_len=service.llm.max_seq_len)

    async def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        """Text of token ids."""
        self._service.check_model(body.model)
        text = await self._service.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return DetokenizeResponse(prompt=text)

    async def health(self) -> Response:
        """200 while requests are taken, else 503."""
        if self._service.llm.failure is not None:
            return JSONResponse(error_object(503, "the engine stopped"), 503)
        self._service.gate.check_open()
        return Response(status_code=200)

    async def health_generate(self, request: Request) -> Response:
        """200 when the engine generates, be its queue full or not; else 503."""
        await unless_gone(request.receive, self._readiness.run())
        return Response(status_code=200)

    async def version(self) -> dict[str, str]:
        """The package's version."""
        return {"version": __version__}

    async def metrics(self) -> Response:
        """Prometheus text."""
        return Response(prometheus_text(self._registry), media_type=METRICS_TYPE)

    async def perf_metrics(self) -> Response:
        """Latencies of the requests that ended since the last call, oldest first."""
        recent = list(self._service.meters.recent)
        self._service.meters.recent.clear()
        return JSONResponse(recent)

    async def status(self) -> Response:
        """The numbers of the status page."""
        return JSONResponse(snapshot(self._service))

    async def page(self) -> Response:
        """The status page."""
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _POLICY})


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
