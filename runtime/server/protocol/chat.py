"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.server.protocol.common import (
    Body,
    Bystanders,
    Items,
    Nothing,
    Part,
    SamplingFields,
    Sparse,
    Usage,
)


class TextPart(Body):
    """A piece of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation; a reply may be sent back with the empty fields that clients give it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart] | None = Field(default=None, description="null: only the assistant's, no text")
    name: str | None = None
    refusal: None = None
    annotations: Nothing | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing | None = None
    reasoning_content: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise RequestError("message", "content", expected=f"text from the {self.role}", got="none")
        return self

    def plain(self) -> dict[str, str]:
        """As the template sees it: text parts joined."""
        parts = self.content or ()
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message = {"role": self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(SamplingFields, Bystanders):
    """A conversation to answer."""

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = Field(default=False, description="the template writes special tokens itself")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = Field(default=None, description="refused: this server calls no tools")
    tool_choice: Any = Field(default=None, description="refused unless 'none'")
    functions: None = None
    function_call: Literal["none"] | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: None = None
    web_search_options: None = None


class TopLogprob(Part):
    """One candidate of a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The drawn token of a position with its alternatives, best first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Part):
    """One entry per generated token, the one that ended the text included."""

    content: list[TokenLogprob]


class Reply(Sparse):
    """The assistant's message; in a stream, its next piece."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(Part):
    """One answer of a whole response."""

    index: int
    message: Reply
    token_ids: list[int] | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None


class ChatCompletion(Part):
    """A whole response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatChunkChoice(Part):
    """News of one answer."""

    index: int
    delta: Reply
    token_ids: list[int] | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(Part):
    """One chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
