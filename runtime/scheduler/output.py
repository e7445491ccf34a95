"""What one choice has produced so far, and the decision that it ends: tokens, text and log-probabilities in step.

For each token in order, ends are tested as end token, stop token, stop string, then length.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.text.detokenizer import Detokenizer
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
    """Output of one choice. token_ids hold every token through the one that ended it; logprobs has one entry each. Both
    only ever grow: what is published refers to them.

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
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None

    @property
    def text(self) -> str:
        """The text that may be shown; nothing of it is taken back later."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

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
        armed = len(self.token_ids) >= (self._params.min_tokens or 0)
        if token in self._rules.end_ids and not self._params.ignore_eos:
            self._end_at_token(token)
        elif token in self._rules.stop_ids:
            self._end_at_token(token)
            self.stop_reason = token
        else:
            self._add_text(token, armed)
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
            self._pieces.append(held.text)
            if held.stop is not None:  # completed by an unfinished character: U+FFFD in a stop string
                self.finish_reason, self.stop_reason = FinishReason.STOP, held.stop
                return
            self._pieces.append(self._matcher.finish())
        self.finish_reason = reason

    def _end_at_token(self, token: int) -> None:
        if self._params.include_stop_str_in_output and self._detokenizer is not None:
            self._pieces.append(self._matcher.push(self._detokenizer.push(token), armed=False).text)
        self.finish(FinishReason.STOP)

    def _add_text(self, token: int, armed: bool) -> None:
        if self._detokenizer is None:
            return
        found = self._matcher.push(self._detokenizer.push(token), armed=armed)
        self._pieces.append(found.text)
        if found.stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, found.stop
