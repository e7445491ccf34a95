"""Fields that completions and chat share: names and defaults as OpenAI's and trtllm-serve's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.llm import DEFAULT_PRIORITY

Item = TypeVar("Item")
MIN_SEED, MAX_SEED = -(1 << 63), (1 << 64) - 1
MAX_FIELDS = 100
MAX_BIASES = 1024
MAX_METADATA = 16  # as OpenAI's
# A list whose first wrong item ends its validation: an error for each of a million items would take minutes.
Items = Annotated[list[Item], Field(fail_fast=True)]


def at_most(count: int) -> BeforeValidator:
    """Refuses a larger mapping before any of its members is looked at."""

    def check(value: object) -> object:
        if isinstance(value, Mapping) and len(value) > count:
            raise RequestError("request", "size", expected=f"at most {count} members", got=len(value))
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A request body or a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _not_too_many(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise RequestError("request", "size", expected=f"at most {MAX_FIELDS} fields", got=len(data))
        return data

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, data: Any) -> Any:
        """OpenAI's clients write null for what is left to the server."""
        if not isinstance(data, dict):
            return data
        optional = {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name not in optional}


# A list of what this server does not make: only an empty one says nothing.
Nothing = Annotated[list[Any], Field(max_length=0)]
Metadata = Annotated[dict[str, str], at_most(MAX_METADATA)]


class Part(BaseModel):
    """A response or a part of one; a number that is not finite would be written as null."""

    model_config = ConfigDict(ser_json_inf_nan="null")


class Sparse(Part):
    """A part whose fields are left out while they are None."""

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


class StreamOptions(Body):
    """include_usage: one more chunk with the token counts at the end."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Body):
    """A named JSON schema; `schema` is the schema itself."""

    name: str = Field(default="schema", max_length=128)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must be: anything, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(Body):
    """Sampling, ends and output form. Ranges that the engine checks itself are not repeated here."""

    model: str = Field(max_length=1024)
    n: int = 1
    best_of: int | None = Field(default=None, description="must equal n: there is no beam search")
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = Field(default=1.0, ge=0, le=100)
    top_p: float | None = Field(default=1.0, ge=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: Annotated[dict[str, float], at_most(MAX_BIASES)] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = Field(default=True, description="false: choices carry token_ids and no text")
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: float = Field(
        default=DEFAULT_PRIORITY, ge=0, le=1, description="the higher one gets a slot first, also a running one's"
    )
    user: str | None = Field(default=None, description="accepted and not used")


class Bystanders(Body):
    """Fields of OpenAI's newer endpoints that change no text here; service_tier only as the default asks."""

    metadata: Metadata | None = Field(default=None, description="accepted; /v1/responses gives it back")
    prompt_cache_key: str | None = Field(default=None, description="accepted and not used")
    safety_identifier: str | None = Field(default=None, description="accepted and not used")
    parallel_tool_calls: bool | None = Field(default=None, description="accepted and not used: no tools are called")
    service_tier: Literal["auto", "default"] | None = None


class PromptDetails(Part):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int


class Usage(Part):
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        """Counts with their sum; `cached` of the prompt tokens came from the prefix cache."""
        details = PromptDetails(cached_tokens=cached)
        return cls(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
            prompt_tokens_details=details,
        )  # fmt: skip


class ErrorDetail(Part):
    """message names what is wrong, param the field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Part):
    """Every response that is not 2xx."""

    error: ErrorDetail


class ModelCard(Part):
    """One entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trtllm-replayssm"
    max_model_len: int


class ModelList(Part):
    """Body of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
