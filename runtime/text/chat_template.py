"""A model's chat template: messages to prompt text, in a sandbox of a process of its own.

Templates come with checkpoints, so they are not trusted: no loader (no file can be included or imported), no access to
attributes that lead out of the sandbox, no change of the arguments, bounded time, memory and output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trtllm_replayssm.bundle_parts import bundle_parts
from trtllm_replayssm.checks import shown
from trtllm_replayssm.errors import CheckpointError, RequestError
from trtllm_replayssm.runtime.text.render_process import RenderProcess
from trtllm_replayssm.runtime.text.sandbox import environment

_RESERVED = frozenset({"messages", "add_generation_prompt", "tools", "documents"})
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """One template. May be rendered from any thread, one conversation at a time; the others wait."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, **bounds: Any) -> None:
        """special_tokens: `bos_token` and the like, as the template may name them. Raises CheckpointError.

        bounds: of one rendering, see `RenderProcess`.
        """
        try:
            environment().parse(source)  # not compiled: that would compute constant expressions in this process
        except (TemplateError, RecursionError) as error:
            raise CheckpointError("chat template", "template", expected="a Jinja template", got=str(error)) from error
        self._process = RenderProcess(source, **bounds)
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
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        return self._process.render(
            {**self._special, **(extra or {}), **given, "tools": None, "documents": None}
        )


def load_chat_template(directory: str | Path) -> ChatTemplate | None:
    """The template of a checkpoint or bundle directory, None when it has none.

    Read from chat_template.jinja, else from `chat_template` of tokenizer_config.json (a string, or a list with one
    named "default"). Raises CheckpointError for a file that is damaged.
    """
    folder = next(iter(bundle_parts(Path(directory))), Path(directory))
    file, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = _config(file) if file.is_file() else {}
    source = _text(own) if own.is_file() else _named_default(file, config.get("chat_template"))
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError("chat template", str(file), expected="a readable text file", got=str(error)) from error


def _config(file: Path) -> dict[str, Any]:
    text = _text(file)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("chat template", str(file), expected="JSON", got=str(error)) from error
    if not isinstance(config, dict):
        raise CheckpointError("chat template", str(file), expected="a JSON object", got=type(config).__name__)
    return config


def _named_default(file: Path, value: object) -> str | None:
    """The template among what a configuration holds: one text, or several by name."""
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        value = {str(entry.get("name")): entry.get("template") for entry in value}.get("default")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(
        "chat template", str(file), expected="chat_template: a text, or a list of names and texts", got=shown(value)
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
