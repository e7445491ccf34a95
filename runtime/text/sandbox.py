"""Jinja as chat templates get it: a sandbox without a loader, with the filters and functions that transformers has.

Not here: bounds on time and memory, which no sandbox inside a process can give; see `render_process`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 16 << 20


class Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; here its text is only text.

    Variables that are set inside stay inside, as in transformers.
    """

    tags = frozenset({"generation"})  # type: ignore[assignment]  # Jinja only looks into it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def environment() -> Environment:
    """As transformers sets it up, so that templates mean the same."""
    extensions = ["jinja2.ext.loopcontrols", Generation]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _now
    return made


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """The template's text. Raises whatever the template raises, SecurityError for a text that is too long."""
    pieces, length = [], 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise SecurityError(f"more than {MAX_CHARACTERS} characters of output")
    return "".join(pieces)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
