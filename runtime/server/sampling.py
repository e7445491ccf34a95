"""From a request body to `SamplingParams`: the server's limits, and fields that only HTTP has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtllm_replayssm.errors import RequestError, UnsupportedError
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.server.limits import Limits
from trtllm_replayssm.runtime.server.protocol.common import SamplingFields

SEEDS = 1 << 64
MAX_BIAS = 100.0
# Fields that mean the same and are called the same in both.
_SAME_NAME = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "truncate_prompt_tokens", "detokenize",
)  # fmt: skip


def sampling_params(
    body: SamplingFields, limits: Limits, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The settings that a body asks for. Raises RequestError naming the field.

    max_tokens, logprobs: as the endpoint's own fields say.
    """
    check_common(body, limits)
    within("max_tokens", max_tokens, limits.max_tokens)
    within("logprobs", logprobs, limits.max_logprobs)
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    return SamplingParams(
        **values,
        max_tokens=limits.max_tokens if max_tokens is None else max_tokens,
        seed=None if body.seed is None else body.seed % SEEDS,
        stop=_stops(body.stop, limits),
        logit_bias=_bias(body.logit_bias),
        logprobs=logprobs,
    )


def check_common(body: SamplingFields, limits: Limits) -> None:
    """Refuse what no setting of the engine stands for."""
    within("n", body.n, limits.max_n)
    if body.best_of is not None and body.best_of != body.n:
        raise UnsupportedError("request", "best_of", expected=f"n = {body.n} or unset", got=body.best_of)
    if body.stream_options is not None and not body.stream:
        raise RequestError("request", "stream_options", expected="stream = true beside it", got="stream = false")
    within("priority", body.priority, limits.max_priority)
    within("stop_token_ids", len(body.stop_token_ids or ()), limits.max_stops)


def refuse_tools(tools: object, tool_choice: object) -> None:
    """Tools change what the answer means, so they are refused rather than ignored."""
    if tools:
        raise UnsupportedError("request", "tools", expected="none: this server calls no tools", got="a list of tools")
    if tool_choice not in (None, "none"):
        raise UnsupportedError("request", "tool_choice", expected="'none'", got="another choice")


def within(name: str, value: float | None, limit: float | None) -> None:
    """Raise RequestError when a number of the request exceeds the server's limit."""
    if value is not None and limit is not None and value > limit:
        raise RequestError("request", name, expected=f"at most {limit}", got=str(value)[:40])


def _stops(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...] | None:
    if stop is None:
        return None
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    within("stop", len(stops), limits.max_stops)
    for text in stops:
        if len(text) > limits.max_stop_length:
            limit = limits.max_stop_length
            raise RequestError("request", "stop", expected=f"at most {limit} characters", got=len(text))
    return stops or None


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    result = {}
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 12 and str(int(token)) == token):
            raise RequestError("request", "logit_bias", expected="token ids as keys", got=repr(token[:40]))
        if abs(value) > MAX_BIAS:
            raise RequestError("request", "logit_bias", expected=f"-{MAX_BIAS:g}..{MAX_BIAS:g}", got=value)
        result[int(token)] = value
    return result
