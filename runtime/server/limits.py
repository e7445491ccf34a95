"""What one server accepts: sizes of requests, queue and waits. Frozen, checked when made."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trtllm_replayssm.errors import ConfigError

_MAY_BE_ZERO = frozenset({"max_queue_size", "max_logprobs", "max_stops", "max_priority", "drain_seconds"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds of one request, and of all of them together.

    max_queue_size: choices that wait for a slot; more are answered 429. max_prompts: prompts of one completion.
    max_n: choices of one prompt. max_tokens: output tokens of one choice, None: the sequence limit.
    max_logprobs: alternatives per token. max_stops, max_stop_length: stop strings (characters) and stop tokens.
    max_priority: that a request may ask for.
    body_bytes, header_bytes: of one HTTP request; all_bodies_bytes: of all that are there at once. body_lists: lists
    and objects in one body; see `bounds` for what else follows from it. schema_bytes: of a JSON schema in
    response_format; schema_seconds: for it to compile.
    body_seconds: to send a whole body. drain_seconds: for what runs to finish after SIGTERM.
    """

    max_queue_size: int = 256
    max_prompts: int = 64
    max_n: int = 16
    max_tokens: int | None = None
    max_logprobs: int = 20
    max_stops: int = 16
    max_stop_length: int = 256
    max_priority: float = 1.0
    body_bytes: int = 4 << 20
    all_bodies_bytes: int = 256 << 20
    body_lists: int = 16 << 10
    header_bytes: int = 16 << 10
    schema_bytes: int = 64 << 10
    schema_seconds: float = 5.0
    body_seconds: float = 30.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_tokens":
                continue
            low = 0 if field.name in _MAY_BE_ZERO else 1
            high = 1 if field.name == "max_priority" else (1 << 62) - 1
            kinds = (int, float) if field.name.endswith(("seconds", "priority")) else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                expected = f"a number of at least {low}" if high > 1 else "a number in 0..1"
                raise ConfigError("Limits", field.name, expected=expected, got=repr(value))
        if self.all_bodies_bytes < self.body_bytes:
            expected = f"at least body_bytes = {self.body_bytes}"
            raise ConfigError("Limits", "all_bodies_bytes", expected=expected, got=self.all_bodies_bytes)
