"""A model's chat template: messages to prompt text, in a sandbox.

Templates come with checkpoints, so they are not trusted: no loader (no file can be included or imported), no access to
attributes that lead out of the sandbox, no change of the arguments, a bounded output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtllm_replayssm.errors import CheckpointError, RequestError

MAX_CHARACTERS = 16 << 20
_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """One compiled template. May be rendered from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """special_tokens: `bos_token` and the like, as the template may name them. Raises CheckpointError."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise CheckpointError("chat template", "template", expected="a Jinja template", got=str(error)) from error
        self._special = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt of a conversation. extra: more variables of the template. Raises RequestError, whatever fails."""
        clash = sorted(_RESERVED & set(extra or ()))
        if clash:
            raise RequestError(
                "chat template", "chat_template_kwargs", expected=f"names other than {sorted(_RESERVED)}", got=clash
            )
        variables = {**self._special, **(extra or {})}
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **variables
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_CHARACTERS:
                    raise SecurityError(f"more than {MAX_CHARACTERS} characters of output")
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(
                "chat template", "messages", expected="messages that the model's template accepts", got=_reason(error)
            ) from error
        return "".join(pieces)


def load_chat_template(directory: str | Path) -> ChatTemplate | None:
    """The template of a checkpoint directory, None when it has none.

    Read from chat_template.jinja, else from `chat_template` of tokenizer_config.json (a string, or a list with one
    named "default"). Raises CheckpointError for a file that is damaged.
    """
    folder = Path(directory)
    config: Any = {}
    file = folder / "tokenizer_config.json"
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError("chat template", str(file), expected="JSON", got=str(error)) from error
    if not isinstance(config, dict):
        raise CheckpointError("chat template", str(file), expected="a JSON object", got=type(config).__name__)
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {str(entry.get("name")): entry.get("template") for entry in source}.get("default")
    own = folder / "chat_template.jinja"
    if own.is_file():
        source = own.read_text(encoding="utf-8")
    return ChatTemplate(source, _special_tokens(config)) if isinstance(source, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _environment() -> Environment:
    """As transformers sets it up, so that templates mean the same."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
