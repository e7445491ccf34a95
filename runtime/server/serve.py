"""Runs the application under uvicorn until SIGTERM or SIGINT: then new requests get 503 and running ones finish."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
from types import FrameType

import uvicorn

from trtllm_replayssm.errors import ConfigError, RequestError, UnsupportedError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.server.app import make_app
from trtllm_replayssm.runtime.server.http import Protocol
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.server.settings import ServerSettings
from trtllm_replayssm.runtime.text.chat_template import ChatTemplate

OBJECTS_OF_STEPS = 50_000  # made and not yet gone before the youngest are walked; 1,024 streams have some 10,000 a step
_LOG = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """A server whose first signal drains; a second ends what runs with an error, a third ends the process."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None
        self._events: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Remember the loop that signals must reach."""
        self._events = asyncio.get_running_loop()
        try:
            await super().startup(sockets)  # type: ignore[arg-type]
        except SystemExit as error:  # how uvicorn says that it cannot listen, while it handles what the system said
            raise _no_address(self.config.host, self.config.port, error.__context__) from error

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal, in the main thread."""
        gate = self._service.gate
        if self._events is None or gate.cut:
            self.should_exit = self.force_exit = True
        elif gate.stopping:
            gate.cut = True
            self._events.call_soon_threadsafe(self._service.halt)
        else:
            gate.stopping = True
            self._events.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        _LOG.warning("stopping: new requests get 503, running ones have %g s", self._service.limits.drain_seconds)
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        await self._service.drain()
        self.should_exit = True


def require_address(settings: ServerSettings) -> None:
    """Raise ConfigError for an unknown host and for a port that is taken or not ours: before a model is loaded for it.

    What else keeps a server from listening is left to the server, which may do without one of several families.
    """
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _no_address(host, port, error) from error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:  # with the options that the server's own will have
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise _no_address(host, port, error) from error


def _no_address(host: str, port: int, reason: BaseException | None) -> ConfigError:
    why = reason.strerror if isinstance(reason, OSError) else None
    return ConfigError(
        "serve", "port", expected="an address to listen on", got=f"{host}:{port}" + (f" ({why})" if why else ""),
        hint="Choose another with --host and --port",
    )  # fmt: skip


def uvicorn_config(service: Service) -> uvicorn.Config:
    """How uvicorn runs the application. h11 and asyncio: one behaviour wherever it is installed."""
    settings = service.settings
    return uvicorn.Config(
        make_app(service),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        loop="asyncio",
        http=Protocol,
        ws="none",
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=2 * settings.limits.header_bytes,
    )


def serve(llm: LLM, settings: ServerSettings, template: ChatTemplate | None) -> None:
    """Serve until told to stop; returns then. The LLM stays the caller's."""
    service = Service(llm, settings, template)
    try:
        service.guided.prepare()
    except (UnsupportedError, RequestError) as reason:  # asked again, and answered with it, by requests
        _LOG.info("response_format is not served: %s", reason)
    server = DrainingServer(uvicorn_config(service), service)
    spare_the_collector()
    server.run()


def spare_the_collector() -> None:
    """Keep the garbage collector, which holds every thread, from what stays and from what goes by itself: of this
    process, once all is loaded.

    What was loaded is not walked any more. What a step publishes is gone at the next one; thousands of such objects,
    counted as new ones, would have them walked at every step, and all that lives every few steps.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_OF_STEPS)
