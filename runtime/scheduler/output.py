"""What one choice has produced so far, and the decision that it ends: tokens, text and log-probabilities in step.

For each token in order, ends are tested as end token, stop token, stop string, then length.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.text.detokenizer import Detokenizer
from trtllm_replayssm.runtime.text.growing import GrowingText
from trtllm_replayssm.runtime.text.stops import StopMatcher
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer


class FinishReason(str, Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class EndRules:
    """end_ids: tokens that end the model's text; stop_ids: the request's own; limit: output tokens at most."""

    end_ids: frozenset[int]
    stop_ids: frozenset[int]
    limit: int


class OutputBuffer:
    """Output of one choice. token_ids hold every token through the one that ended it; logprobs has one entry each;
    shown is the text that may be shown, of which nothing is taken back later. All three only ever grow: what is
    published refers to them.

    text leaves out the end or stop token and the stop string, unless include_stop_str_in_output is set. stop_reason
    is the stop string or stop token that ended it; None for an end token, as TensorRT-LLM reports it.
    """

    def __init__(self, params: SamplingParams, rules: EndRules, tokenizer: Tokenizer | None) -> None:
        self._params = params
        self._rules = rules
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if tokenizer is not None and params.detokenize
            else None
        )
        self._matcher = StopMatcher(params.stops, include_stop=params.include_stop_str_in_output)
        self._stops = bool(params.stops)
        self._ends = rules.stop_ids if params.ignore_eos else rules.stop_ids | rules.end_ids
        self.shown = GrowingText()
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None

    @property
    def text(self) -> str:
        """The text of `shown`."""
        return self.shown.upto(len(self.shown))

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self._rules.limit - len(self.token_ids)

    def push(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take one emitted token; returns whether the choice ends with it."""
        self.token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob
        if token in self._ends:
            self._end_at_token(token)
        elif self._detokenizer is not None:
            self._add_text(self._detokenizer.push(token))
        if self.finish_reason is None and self.room <= 0:
            self.finish(FinishReason.LENGTH)
        return self.finish_reason is not None

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        """End the choice for a reason other than a stop string, and show the text held back."""
        if self.finish_reason is not None:
            return
        self.error = error
        if self._detokenizer is not None:
            held = self._matcher.push(self._detokenizer.finish(), armed=reason is FinishReason.LENGTH)
            self.shown.add(held.text)
            if held.stop is not None:  # completed by an unfinished character: U+FFFD in a stop string
                self.finish_reason, self.stop_reason = FinishReason.STOP, held.stop
                return
            self.shown.add(self._matcher.finish())
        self.finish_reason = reason

    def _end_at_token(self, token: int) -> None:
        if self._params.include_stop_str_in_output and self._detokenizer is not None:
            self.shown.add(self._matcher.push(self._detokenizer.push(token), armed=False).text)
        self.finish(FinishReason.STOP)
        if self._params.ignore_eos or token not in self._rules.end_ids:
            self.stop_reason = token

    def _add_text(self, piece: str) -> None:
        if not self._stops:
            self.shown.add(piece)
            return
        found = self._matcher.push(piece, armed=len(self.token_ids) >= (self._params.min_tokens or 0))
        self.shown.add(found.text)
        if found.stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, found.stop
