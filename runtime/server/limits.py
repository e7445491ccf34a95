"""What one server accepts: sizes of requests, queue and waits. Frozen, checked when made."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trtllm_replayssm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds of one request, and of all of them together.

    max_queue_size: choices that wait for a slot; more are answered 429. max_prompts: prompts of one completion.
    max_n: choices of one prompt. max_tokens: output tokens of one choice, None: the sequence limit.
    max_logprobs: alternatives per token. max_stops, max_stop_length: stop strings (characters) and stop tokens.
    body_bytes, header_bytes: of one HTTP request. body_lists: lists and objects in one body; see `bounds` for what
    else follows from it. schema_bytes: of a JSON schema in response_format.
    body_seconds: to send a whole body. drain_seconds: for what runs to finish after SIGTERM.
    """

    max_queue_size: int = 256
    max_prompts: int = 64
    max_n: int = 16
    max_tokens: int | None = None
    max_logprobs: int = 20
    max_stops: int = 16
    max_stop_length: int = 256
    body_bytes: int = 4 << 20
    body_lists: int = 16 << 10
    header_bytes: int = 16 << 10
    schema_bytes: int = 64 << 10
    body_seconds: float = 30.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_tokens":
                continue
            low = 0 if field.name in ("max_queue_size", "max_logprobs", "max_stops", "drain_seconds") else 1
            kinds = (int, float) if field.name.endswith("seconds") else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value < 1 << 62:
                raise ConfigError("Limits", field.name, expected=f"a number of at least {low}", got=repr(value))
