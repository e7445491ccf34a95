"""SamplingParams: what one request asks for. Names and defaults follow TensorRT-LLM's LLM API.

Not here: what is done with them (`distribution`, `logprobs`, the scheduler's output buffer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from trtllm_replayssm.checks import shown
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.sampling.mask import LogitsMask

MAX_SEED = 1 << 64
MAX_CHOICES = 128
MAX_LOGPROBS = 100
# Far beyond any use, and far from where a score of float64 would overflow whatever the logits and the counts are.
MAX_TEMPERATURE = 1e4
MAX_PENALTY = 1e4
MAX_BIAS = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of one request; None means "not set". Raises RequestError, naming the field, for a bad value.

    max_tokens: output tokens at most; None: up to the sequence limit. min_tokens: before that many, end and stop
        tokens cannot be drawn and stop strings do not count.
    temperature (1 when unset), top_k (0: all), top_p, min_p: filters in this order. Decoding is greedy when
        temperature is 0, top_k is 1 or top_p is 0, and when none of temperature, top_k, top_p is set. temperature:
        0..1e4; a tiny one draws the best token, of equals each as often.
    seed: 64-bit; unset: derived from the engine's seed and the request's number. n: choices.
    stop: strings that end the text; stop_token_ids: tokens that do; end_id: overrides the model's end tokens
        (-1: none); ignore_eos: end tokens do not stop.
    include_stop_str_in_output: keep the stop string or stop token in the text. Token ids are never cut: they hold
        every generated token through the one that ended the sequence.
    repetition_penalty (1e-4..1e4) counts prompt and output; presence_penalty and frequency_penalty (-1e4..1e4) count
        output only.
    logit_bias: additive, by token id, -1e4..1e4. logprobs: None off, 0 the drawn token, k also the k best.
    pad_id: accepted for compatibility; rows are padded without a token. truncate_prompt_tokens: keep the last k.
    detokenize: False leaves the text empty. add_special_tokens: as the tokenizer's, for text prompts.
    logits_mask: tokens that may be drawn, at its state before any output; each choice follows a fork of its own.
    """

    max_tokens: int | None = 32
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    end_id: int | None = None
    pad_id: int | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    logits_mask: LogitsMask | None = None

    def __post_init__(self) -> None:
        _integer(self, "n", 1, MAX_CHOICES)
        for name, low, high in (
            ("max_tokens", 1, None),
            ("min_tokens", 0, None),
            ("top_k", 0, None),
            ("seed", 0, MAX_SEED - 1),
            ("end_id", -1, None),
            ("pad_id", -1, None),
            ("logprobs", 0, MAX_LOGPROBS),
            ("truncate_prompt_tokens", 1, None),
        ):
            if getattr(self, name) is not None:
                _integer(self, name, low, high)
        for name, low_value, high_value in (
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
            ("repetition_penalty", 1 / MAX_PENALTY, MAX_PENALTY),
        ):
            value = getattr(self, name)
            if value is not None and not _inside(value, low_value, high_value):
                raise RequestError(
                    "SamplingParams", name, expected=f"a number in {low_value:g}..{high_value:g}", got=shown(value)
                )
        self._check_stops()
        self._check_bias()
        self._check_mask()
        if self.max_tokens is not None and self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                "SamplingParams", "min_tokens", expected=f"at most max_tokens={self.max_tokens}", got=self.min_tokens
            )

    def _check_stops(self) -> None:
        if self.stop is not None and not isinstance(self.stop, Sequence):
            raise RequestError("SamplingParams", "stop", expected="a string or a list of them", got=shown(self.stop))
        for text in self.stops:
            if not isinstance(text, str) or not text:
                raise RequestError("SamplingParams", "stop", expected="non-empty strings", got=shown(self.stop))
        if self.stops and not self.detokenize:
            raise RequestError("SamplingParams", "stop", expected="detokenize=True with stop strings", got="False")
        ids = self.stop_token_ids
        if ids is not None and (not isinstance(ids, (Sequence, Set)) or isinstance(ids, (str, bytes))):
            raise RequestError("SamplingParams", "stop_token_ids", expected="a list of token ids", got=shown(ids))
        for token in ids or ():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError("SamplingParams", "stop_token_ids", expected="token ids", got=shown(token))

    def _check_bias(self) -> None:
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                "SamplingParams", "logit_bias", expected="a mapping of token ids to numbers", got=shown(self.logit_bias)
            )
        for token, value in (self.logit_bias or {}).items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError("SamplingParams", "logit_bias", expected="token ids as keys", got=shown(token))
            if not _inside(value, -MAX_BIAS, MAX_BIAS):
                raise RequestError(
                    "SamplingParams", "logit_bias", expected=f"numbers in {-MAX_BIAS:g}..{MAX_BIAS:g}", got=shown(value)
                )

    def _check_mask(self) -> None:
        methods = ("allowed", "accept", "fork")
        if self.logits_mask is not None and not all(callable(getattr(self.logits_mask, m, None)) for m in methods):
            raise RequestError(
                "SamplingParams", "logits_mask", expected=f"an object with {methods}", got=shown(self.logits_mask)
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, also when one string was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax of the penalised logits."""
        if self.temperature == 0 or self.top_k == 1 or self.top_p == 0:
            return True
        return self.temperature is None and self.top_p is None and self.top_k is None

    @property
    def penalises(self) -> bool:
        """Whether logits change before the argmax: a bias or a penalty is set (min_tokens not counted)."""
        return bool(self.logit_bias) or self.repeats or bool(self.presence_penalty) or bool(self.frequency_penalty)

    @property
    def repeats(self) -> bool:
        """Whether a repetition penalty other than 1 is set."""
        return self.repetition_penalty is not None and self.repetition_penalty != 1


def _integer(params: SamplingParams, name: str, low: int, high: int | None) -> None:
    value = getattr(params, name)
    legal = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not legal:
        bound = f">= {low}" if high is None else f"in {low}..{high}"
        raise RequestError("SamplingParams", name, expected=f"an integer {bound}", got=shown(value))


def _inside(value: object, low: float, high: float) -> bool:
    """Whether value is a number in low..high; NaN and booleans are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
