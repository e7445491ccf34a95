"""What a caller gets back: names after TensorRT-LLM's LLM API. Plain values, made from a request at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs
from trtllm_replayssm.runtime.scheduler.request import Choice, Request
from trtllm_replayssm.runtime.scheduler.times import RequestTimes


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One choice.

    token_ids: every generated token, through the one that ended it; logprobs: one entry each when asked for.
    text: without stop strings and end tokens unless asked for. finish_reason: "stop", "length", "cancelled", "error"
    or None while it runs. stop_reason: the stop string or stop token id; None for the model's end token.
    error: what went wrong when finish_reason is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    # Lengths at the previous output of the same stream.
    _last_text_len: int = 0
    _last_token_ids_len: int = 0

    @property
    def length(self) -> int:
        """Generated tokens."""
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        """Text added since the previous output of the stream."""
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        """Tokens added since the previous output of the stream."""
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[TokenLogprobs]:
        """Log-probabilities added since the previous output of the stream."""
        return (self.logprobs or [])[self._last_token_ids_len :]


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's choices so far. prompt: the text, None when token ids were given. finished: all choices ended.

    times: when it arrived, started and ended. cached_tokens: prompt tokens that came from the prefix cache.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    times: RequestTimes
    cached_tokens: int = 0

    def after(self, previous: RequestOutput | None) -> RequestOutput:
        """This output with diffs that count from `previous`, an earlier output of the same request."""
        if previous is None:
            return self
        outputs = [
            replace(now, _last_text_len=len(before.text), _last_token_ids_len=len(before.token_ids))
            for now, before in zip(self.outputs, previous.outputs, strict=True)
        ]
        return replace(self, outputs=outputs)


def request_output(request: Request) -> RequestOutput:
    """The output of a request as it stands."""
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_ids),
        outputs=[_completion(choice) for choice in request.choices],
        finished=request.finished,
        times=replace(request.times),
        cached_tokens=request.cached_tokens,
    )


def _completion(choice: Choice) -> CompletionOutput:
    output = choice.output
    scored = choice.request.params.logprobs is not None
    return CompletionOutput(
        index=choice.index,
        text=output.text,
        token_ids=list(output.token_ids),
        cumulative_logprob=output.cumulative_logprob if scored else None,
        logprobs=list(output.logprobs) if scored else None,
        finish_reason=None if output.finish_reason is None else output.finish_reason.value,
        stop_reason=output.stop_reason,
        error=output.error,
    )
