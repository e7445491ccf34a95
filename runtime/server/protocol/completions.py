"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trtllm_replayssm.runtime.server.protocol.common import Items, Part, SamplingFields, Usage


class CompletionRequest(SamplingFields):
    """Text or token ids to go on from; a list of them makes n choices for each."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    logprobs: int | None = Field(default=None, description="alternatives per token; 0: of the drawn tokens only")
    suffix: None = None
    echo: bool = False
    add_special_tokens: bool = True
    max_tokens: int | None = Field(default=None, description="0: only with echo, which then is all there is")


class CompletionLogprobs(Part):
    """One entry per generated token, the one that ended the text included; with echo those of the prompt before them.

    The first token of a prompt has no score: None.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Part):
    """One answer. token_ids only when detokenize is false."""

    index: int
    text: str
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Completion(Part):
    """A whole response, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
