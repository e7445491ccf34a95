"""The conversation in the terminal: what a model writes reaches the screen as text and cannot steer it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trtllm_replayssm.cli.chat import converse
from trtllm_replayssm.cli.chat_backends import Messages


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
