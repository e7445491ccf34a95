"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trtllm_replayssm.runtime.server.protocol.common import Body, Items, Part, SamplingFields, Sparse, Usage


class TextPart(Body):
    """A piece of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As the template sees it: text parts joined."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(SamplingFields):
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
