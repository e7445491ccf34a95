"""The conversation in the terminal: what a model writes reaches the screen as text and cannot steer it; a server that
answers with anything else is told in one line, and the conversation goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from trtllm_replayssm.cli.chat import converse
from trtllm_replayssm.cli.chat_backends import LocalBackend, Messages, RemoteBackend
from trtllm_replayssm.errors import ConfigError, RequestError


class Hostile:
    """Answers with control characters."""

    def __init__(self) -> None:
        self.heard: list[list[str]] = []

    def reply(self, messages: Messages) -> Iterator[str]:
        """See `Backend`."""
        self.heard.append([message["content"] for message in messages])
        yield from ("a\x1b[2J", "\x9b5n\r\x07", "\tb\nc\x7f")


def test_control_characters_are_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Hostile()
    converse(backend, iter(["x", "y"]), None)
    shown = capsys.readouterr().out
    assert shown == "a\u241b[2J\ufffd5n\u240d\u2407\tb\nc\ufffd\n" * 2
    assert backend.heard[1] == ["x", "a\x1b[2J\x9b5n\r\x07\tb\nc\x7f", "y"]  # the conversation keeps what was said


@contextmanager
def serving(models: bytes, *answers: bytes) -> Iterator[str]:
    """A server with this list of models, whose chat answers are these bodies in turn."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(models, len(models))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = left.pop(0)
            self.answer(body, len(body) + 1)  # more was promised

        def answer(self, body: bytes, length: int) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


MODELS = b'{"data": [{"id": "m"}]}'
GOOD = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'


def test_what_is_no_answer_is_told_in_one_line_and_the_conversation_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    odd = (
        b"data: {", b"data: 7\n", b'data: {"choices": 1}\n', b'data: {"choices": [{"delta": null}]}\n',
        b"data: \xff\n", b"data: " + b"[" * 100_000 + b"\n", b'data: {"error": {"message": "full"}}\n',
        b'data: {"error": 1}\n', b"", GOOD,
    )  # fmt: skip
    with serving(MODELS, *odd, GOOD + b"data: [DONE]\n\n") as url:
        converse(RemoteBackend(url, None, None, {}), iter("x" * (len(odd) + 1)), None)
    shown = capsys.readouterr()
    assert [line.split(":")[:2] for line in shown.err.split("\n") if line] == [["chat", " answer"]] * len(odd)
    assert "full" in shown.err and shown.out == "hihi\n"  # the first one without its end


@pytest.mark.parametrize("models", [b"{", b"[]", b'{"data": []}', b'{"data": {"id": 1}}', b"[" * 100_000])
def test_a_list_of_models_that_is_none_is_refused(models: bytes) -> None:
    with serving(models) as url, pytest.raises(RequestError, match="a list of models"):
        RemoteBackend(url, None, None, {})


def test_a_missing_directory_is_told_from_one_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none, which is no directory"):
        LocalBackend(str(tmp_path / "none"), {})
    with pytest.raises(ConfigError, match="without one"):
        LocalBackend(str(tmp_path), {})
