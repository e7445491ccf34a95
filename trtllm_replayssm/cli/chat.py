"""`trtllm-replayssm chat`: a conversation in the terminal, with a server or with a checkpoint in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from trtllm_replayssm.cli.chat_backends import Backend, LocalBackend, RemoteBackend
from trtllm_replayssm.errors import ReplaySSMError

QUIT = frozenset({"/quit", "/exit", "/q"})
# What a model writes may not steer the terminal: control characters are shown as pictures of themselves.
_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
HELP = "/quit ends, /reset forgets the conversation, /help shows this"


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "chat",
        help="talk to a server or a checkpoint in the terminal",
        description=f"Talk to a running server (URL) or to a checkpoint (directory). {HELP}.",
    )
    parser.add_argument("target", metavar="URL_OR_MODEL", help="http://host:port, or a checkpoint directory")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of one answer (default 512)")
    parser.add_argument("--temperature", type=float, help="0: greedy (default: the server's)")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", help="a string that ends an answer; may be repeated")
    parser.add_argument("--model", help="model name on the server (default: its first)")
    parser.add_argument("--api-key", help="of the server")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read turns from stdin until it ends or /quit, and print the answers."""
    settings = {
        name: getattr(arguments, name)
        for name in ("max_tokens", "temperature", "top_p", "seed", "stop")
        if getattr(arguments, name) is not None
    }
    with ExitStack() as stack:
        if arguments.target.startswith(("http://", "https://")):
            backend: Backend = RemoteBackend(arguments.target, arguments.api_key, arguments.model, settings)
        else:
            backend = stack.enter_context(LocalBackend(arguments.target, settings))
        converse(backend, _turns(sys.stdin.isatty()), arguments.system)
    return 0


def converse(backend: Backend, turns: Iterator[str], system: str | None) -> None:
    """Answer each turn with the conversation so far; a failed or interrupted answer drops its turn."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    for turn in turns:
        if turn in QUIT:
            return
        if turn == "/reset":
            messages = list(opening)
            continue
        if turn == "/help":
            print(HELP)
            continue
        messages.append({"role": "user", "content": turn})
        try:
            pieces = []
            for piece in backend.reply(messages):
                pieces.append(piece)
                print(piece.translate(_SHOWN), end="", flush=True)
            print(flush=True)
        except KeyboardInterrupt:
            print(" [interrupted]")
            messages.pop()
            continue
        except ReplaySSMError as error:
            sys.stderr.write(f"\n{error}\n")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _turns(prompted: bool) -> Iterator[str]:
    """Lines of stdin that are not empty."""
    while True:
        try:
            line = input("> " if prompted else "")
        except EOFError:
            return
        if line.strip():
            yield line.strip()
