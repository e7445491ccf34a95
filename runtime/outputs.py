"""What a caller gets back: names after TensorRT-LLM's LLM API. Values, made from a request at one moment.

An output is made at every step, so what grows with the answer is copied only where somebody looks at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs
from trtllm_replayssm.runtime.scheduler.request import Choice, Request
from trtllm_replayssm.runtime.scheduler.times import RequestTimes
from trtllm_replayssm.runtime.text.growing import GrowingText

Entry = TypeVar("Entry")


class Prefix(Generic[Entry]):
    """The entries that a list has now. It may grow afterwards; its entries must not change."""

    __slots__ = ("_copy", "_source", "length")

    def __init__(self, source: Sequence[Entry] = ()) -> None:
        self._source = source
        self._copy: list[Entry] | None = None
        self.length = len(source)

    def entries(self) -> list[Entry]:
        """All of them; the same list at every call."""
        if self._copy is None:
            self._copy = list(self._source[: self.length])
        return self._copy

    def since(self, first: int) -> list[Entry]:
        """The entries from `first` on, without a copy of the others."""
        return list((self._source if self._copy is None else self._copy)[first : self.length])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prefix) and self.entries() == other.entries()

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return repr(self.entries())

    def __reduce__(self) -> tuple[type[Prefix[Entry]], tuple[list[Entry]]]:
        return Prefix, (self.entries(),)  # not what the list has become since


class Shown:
    """The text that a choice shows now; it may grow afterwards. length: pieces of it."""

    __slots__ = ("_source", "length")

    def __init__(self, source: GrowingText | None = None) -> None:
        self._source = GrowingText() if source is None else source
        self.length = len(self._source)

    def text(self) -> str:
        """All of it."""
        return self._source.upto(self.length)

    def since(self, first: int) -> str:
        """The text of the pieces from `first` on, without a copy of the others."""
        return self._source.between(first, self.length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shown) and self.text() == other.text()

    __hash__ = None  # type: ignore[assignment]  # as Prefix

    def __repr__(self) -> str:
        return repr(self.text())

    def __reduce__(self) -> tuple[type[Shown], tuple[GrowingText]]:
        return Shown, (self._source.first(self.length),)  # not what the text has become since


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One choice.

    token_ids: every generated token, through the one that ended it; logprobs: one entry each when asked for.
    shown: its text, without stop strings and end tokens unless asked for. finish_reason: "stop", "length", "cancelled",
    "error" or None while it runs. stop_reason: the stop string or stop token id; None for the model's end token.
    error: what went wrong when finish_reason is "error".
    """

    index: int
    shown: Shown = field(default_factory=Shown)
    tokens: Prefix[int] = field(default_factory=Prefix)
    cumulative_logprob: float | None = None
    scores: Prefix[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    # Lengths at the previous output of the same stream.
    _last_pieces: int = 0
    _last_tokens: int = 0

    @property
    def text(self) -> str:
        """Without stop strings and end tokens unless asked for."""
        return self.shown.text()

    @property
    def token_ids(self) -> list[int]:
        """Every generated token."""
        return self.tokens.entries()

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One entry for each token when asked for."""
        return None if self.scores is None else self.scores.entries()

    @property
    def length(self) -> int:
        """Generated tokens."""
        return self.tokens.length

    @property
    def text_diff(self) -> str:
        """Text added since the previous output of the stream."""
        return self.shown.since(self._last_pieces)

    @property
    def has_text_diff(self) -> bool:
        """Whether there is any."""
        return self.shown.length > self._last_pieces

    @property
    def length_diff(self) -> int:
        """How many tokens were added since the previous output of the stream."""
        return self.tokens.length - self._last_tokens

    @property
    def token_ids_diff(self) -> list[int]:
        """Tokens added since the previous output of the stream."""
        return self.tokens.since(self._last_tokens)

    @property
    def logprobs_diff(self) -> list[TokenLogprobs]:
        """Log-probabilities added since the previous output of the stream."""
        return [] if self.scores is None else self.scores.since(self._last_tokens)

    def after(self, previous: CompletionOutput) -> CompletionOutput:
        """This output with diffs that count from `previous`, an earlier one of the same choice."""
        return CompletionOutput(
            index=self.index, shown=self.shown, tokens=self.tokens, cumulative_logprob=self.cumulative_logprob,
            scores=self.scores, finish_reason=self.finish_reason, stop_reason=self.stop_reason, error=self.error,
            _last_pieces=previous.shown.length, _last_tokens=previous.tokens.length,
        )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's choices so far. prompt: the text, None when token ids were given. finished: all choices ended.

    prompt_token_ids: one list, which all outputs of a request share.

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
        outputs = [now.after(before) for now, before in zip(self.outputs, previous.outputs, strict=True)]
        return RequestOutput(
            request_id=self.request_id, prompt=self.prompt, prompt_token_ids=self.prompt_token_ids, outputs=outputs,
            finished=self.finished, times=self.times, cached_tokens=self.cached_tokens,
        )  # fmt: skip


def request_output(request: Request) -> RequestOutput:
    """The output of a request as it stands."""
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_list,
        outputs=[_completion(choice) for choice in request.choices],
        finished=request.finished,
        times=request.times,
        cached_tokens=request.cached_tokens,
    )


def _completion(choice: Choice) -> CompletionOutput:
    output = choice.output
    scored = choice.request.params.logprobs is not None
    return CompletionOutput(
        index=choice.index,
        shown=Shown(output.shown),
        tokens=Prefix(output.token_ids),
        cumulative_logprob=output.cumulative_logprob if scored else None,
        scores=Prefix(output.logprobs) if scored else None,
        finish_reason=None if output.finish_reason is None else output.finish_reason.value,
        stop_reason=output.stop_reason,
        error=output.error,
    )
