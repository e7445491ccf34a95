"""Bodies of /v1/responses: text in, text out, nothing stored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trtllm_replayssm.runtime.server.protocol.common import (
    MAX_SEED,
    MIN_SEED,
    Body,
    Bystanders,
    Items,
    Nothing,
    Part,
    PromptDetails,
)


class InputText(Body):
    """A piece of an input message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


class InputMessage(Body):
    """One turn of the input; also an item of an earlier output as it was received."""

    type: Literal["message"] = "message"
    id: str | None = Field(default=None, description="accepted and not used")
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(
        default=None, description="accepted and not used"
    )
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[InputText]
    phase: None = None

    def plain(self) -> dict[str, str]:
        """As the template sees it: text parts joined."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class TextFormat(Body):
    """What the text must be; `schema` for json_schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, max_length=128)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The `text` field."""

    format: TextFormat | None = None


class ResponsesRequest(Bystanders):
    """A conversation to answer."""

    model: str = Field(max_length=1024)
    input: str | Items[InputMessage]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=1.0, ge=0, le=100)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    stream: bool = False
    store: bool = Field(default=False, description="refused when true: nothing is stored")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: Nothing | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    reasoning: None = None
    max_tool_calls: None = None
    top_logprobs: Literal[0] | None = None
    stream_options: None = None
    text: TextOptions | None = None
    tools: list[Any] | None = Field(default=None, description="refused: this server calls no tools")
    tool_choice: Any = Field(default=None, description="refused unless 'none'")
    user: str | None = Field(default=None, description="accepted and not used")


class OutputText(Part):
    """A piece of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)


class OutputMessage(Part):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: str
    content: list[OutputText]


class OutputDetails(Part):
    """Output tokens by kind; no reasoning is told apart."""

    reasoning_tokens: int


class ResponsesUsage(Part):
    """Token counts under the names of this endpoint."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Part):
    """Why an answer was cut."""

    reason: str


class ResponsesResponse(Part):
    """The response object, also as its events carry it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: str
    error: dict[str, str] | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    output: list[OutputMessage]
    parallel_tool_calls: bool = False
    previous_response_id: str | None = None
    store: bool = False
    temperature: float | None
    tool_choice: str = "none"
    tools: list[Any] = Field(default_factory=list)
    top_p: float | None
    usage: ResponsesUsage | None = None
