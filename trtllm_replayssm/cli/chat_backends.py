"""Who answers in `trtllm-replayssm chat`: a server over HTTP, or a checkpoint in this process."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import urlsplit

from trtllm_replayssm.checks import shown
from trtllm_replayssm.errors import ConfigError, RequestError

Messages = Sequence[Mapping[str, str]]
TIMEOUT_SECONDS = 600


class Backend(Protocol):
    """Answers a conversation piece by piece."""

    def reply(self, messages: Messages) -> Iterator[str]:
        """The answer's text as it comes. Raises ReplaySSMError."""
        ...


class RemoteBackend:
    """A server with OpenAI's endpoints."""

    def __init__(self, url: str, api_key: str | None, model: str | None, settings: Mapping[str, Any]) -> None:
        """settings: fields of the request. Raises ConfigError for a URL that is none, RequestError from the server."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:  # a port beyond 65535, half an IPv6 address
            raise ConfigError("chat", "url", expected="http://host:port", got=f"{url} ({error})") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError("chat", "url", expected="http://host:port", got=url)
        self._url = url
        self._secure = parts.scheme == "https"
        self._host, self._port = host, port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._settings = dict(settings)
        self._model = model or self._first_model()

    def _open(self, method: str, path: str, body: object = None) -> tuple[http.client.HTTPConnection, Any]:
        """A connection and its response, which has status 200."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, self._base + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise RequestError(
                "chat", "url", expected=f"a server at {self._url}", got=str(error) or type(error).__name__,
                hint="Start one with trtllm-replayssm serve",
            ) from error  # fmt: skip
        if response.status != 200:
            text = response.read(4096).decode("utf-8", "replace")
            connection.close()
            raise RequestError("chat", path, expected="status 200", got=f"{response.status} {_message(text)}")
        return connection, response

    def _first_model(self) -> str:
        connection, response = self._open("GET", "/v1/models")
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError) as error:
            raise RequestError("chat", "/v1/models", expected="a list of models", got=str(error)) from error
        finally:
            connection.close()

    def reply(self, messages: Messages) -> Iterator[str]:
        """See `Backend`. Ending the iteration early closes the connection, which ends the request."""
        body = {"model": self._model, "messages": list(messages), "stream": True, **self._settings}
        connection, response = self._open("POST", "/v1/chat/completions", body)
        try:
            for raw in response:
                line = raw.strip()
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield from _pieces(line.removeprefix(b"data: "))
            raise RequestError("chat", "answer", expected="an answer to its end", got="a connection that was closed")
        except (OSError, http.client.HTTPException) as error:
            got = f"{type(error).__name__}: {error}"
            raise RequestError("chat", "answer", expected="an answer to its end", got=got) from error
        finally:
            connection.close()


class LocalBackend:
    """A checkpoint in this process; use as a context manager."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError for a checkpoint without a chat template."""
        from trtllm_replayssm.runtime.llm import LLM
        from trtllm_replayssm.runtime.sampling.params import SamplingParams
        from trtllm_replayssm.runtime.text.chat_template import load_chat_template

        template = load_chat_template(model)
        if template is None:
            raise ConfigError(
                "chat", "model", expected="a checkpoint with a chat template, or the URL of a server",
                got=f"{model} without one" if Path(model).is_dir() else f"{model}, which is no directory",
            )  # fmt: skip
        self._template = template
        self._params = SamplingParams(**{"temperature": 1.0, **settings})
        self._llm = LLM(model, max_batch_size=1)

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.shutdown()

    def reply(self, messages: Messages) -> Iterator[str]:
        """See `Backend`."""
        text = self._template.render(messages)
        assert self._llm.tokenizer is not None, "a template comes with a tokenizer"
        ids = self._llm.tokenizer.encode(text, False)
        handle = self._llm.generate_async(ids, self._params, streaming=True)
        try:
            for output in handle:
                yield output.outputs[0].text_diff
        finally:
            handle.abort()


def _pieces(event: bytes) -> list[str]:
    """The text of one event. Raises RequestError for an error and for what is no event."""
    try:
        chunk = json.loads(event)
        if "error" not in chunk:
            return [str(choice["delta"].get("content") or "") for choice in chunk["choices"]]
        message = chunk["error"].get("message")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError("chat", "answer", expected="events of a chat completion", got=shown(event)) from error
    raise RequestError("chat", "answer", expected="text", got=message)


def _message(text: str) -> str:
    """The message of an OpenAI error object, or the text."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]
