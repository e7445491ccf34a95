"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

from pydantic import Field

from trtllm_replayssm.runtime.server.protocol.chat import Message
from trtllm_replayssm.runtime.server.protocol.common import Body, Items, Part


class TokenizeRequest(Body):
    """Text, or a conversation as the chat endpoint would render it: one of the two."""

    model: str | None = Field(default=None, max_length=1024)
    prompt: str | None = None
    messages: Items[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class TokenizeResponse(Part):
    """max_model_len: prompt and output tokens of one sequence."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = Field(default=None, max_length=1024)
    tokens: Items[int]
    skip_special_tokens: bool = False


class DetokenizeResponse(Part):
    """Their text."""

    prompt: str
