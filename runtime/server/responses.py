"""/v1/responses: OpenAI's newer endpoint, text only, nothing stored."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trtllm_replayssm.errors import RequestError, UnsupportedError
from trtllm_replayssm.runtime.llm import RequestOutput
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.server.protocol.common import JsonSchema, PromptDetails, ResponseFormat
from trtllm_replayssm.runtime.server.protocol.responses import (
    IncompleteDetails,
    OutputDetails,
    OutputMessage,
    OutputText,
    ResponsesRequest,
    ResponsesResponse,
    ResponsesUsage,
)
from trtllm_replayssm.runtime.server.run import Run
from trtllm_replayssm.runtime.server.sampling import SEEDS, refuse_tools, within
from trtllm_replayssm.runtime.server.service import Service, new_id
from trtllm_replayssm.runtime.server.stream import EventStream, unless_gone


@dataclass(frozen=True, slots=True)
class _Call:
    """One accepted request."""

    body: ResponsesRequest
    id: str = field(default_factory=lambda: new_id("resp_"))
    message_id: str = field(default_factory=lambda: new_id("msg_"))
    created: int = field(default_factory=lambda: int(time.time()))

    def response(self, output: RequestOutput | None) -> ResponsesResponse:
        """The response object; None: nothing has been generated yet."""
        cut = output is not None and output.outputs[0].finish_reason == "length"
        status = "in_progress" if output is None else "incomplete" if cut else "completed"
        return ResponsesResponse(
            id=self.id,
            created_at=self.created,
            model=self.body.model,
            status=status,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if cut else None,
            instructions=self.body.instructions,
            max_output_tokens=self.body.max_output_tokens,
            metadata=self.body.metadata or {},
            output=[] if output is None else [self.message(output.outputs[0].text, status)],
            temperature=self.body.temperature,
            top_p=self.body.top_p,
            usage=None if output is None else _usage(output),
        )

    def message(self, text: str, status: str) -> OutputMessage:
        """The assistant's message."""
        return OutputMessage(id=self.message_id, status=status, content=[OutputText(text=text)])


class Responses:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """The answer to a conversation, whole or as events."""
        service = self._service
        service.check_model(body.model)
        refuse_tools(body.tools, body.tool_choice)
        if body.store:
            raise UnsupportedError("request", "store", expected="false (nothing is stored)", got="true")
        within("max_output_tokens", body.max_output_tokens, service.limits.max_tokens)
        params = SamplingParams(
            max_tokens=service.limits.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            seed=None if body.seed is None else body.seed % SEEDS,
        )
        text = await service.render(_messages(body), add_generation_prompt=True, extra=None)
        ids = await service.prompt(text, field="input")
        run = await service.start_guided(
            [ids], params, _format(body), streaming=body.stream, receive=request.receive
        )
        try:
            call = _Call(body)
            if body.stream:
                return EventStream(_events(call, run), run.close)
            (output,) = await unless_gone(request.receive, run.results())
        except BaseException:
            run.close()
            raise
        run.close()
        return Response(call.response(output).model_dump_json(), media_type="application/json")


async def _events(call: _Call, run: Run) -> AsyncGenerator[str, None]:
    number = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        number += 1
        data = {"type": kind, "sequence_number": number - 1, **fields}
        return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n"

    place = {"item_id": call.message_id, "output_index": 0, "content_index": 0}
    started = call.response(None).model_dump()
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    empty = {**call.message("", "in_progress").model_dump(), "content": []}
    yield event("response.output_item.added", output_index=0, item=empty)
    yield event("response.content_part.added", **place, part=OutputText(text="").model_dump())
    async for _, output in run.news():
        choice = output.outputs[0]
        if choice.text_diff:
            yield event("response.output_text.delta", **place, delta=choice.text_diff, logprobs=[])
        if not output.finished:
            continue
        whole = call.response(output)
        yield event("response.output_text.done", **place, text=choice.text, logprobs=[])
        yield event("response.content_part.done", **place, part=OutputText(text=choice.text).model_dump())
        yield event("response.output_item.done", output_index=0, item=whole.output[0].model_dump())
        yield event(f"response.{whole.status}", response=whole.model_dump())


def _messages(body: ResponsesRequest) -> list[dict[str, str]]:
    head = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*head, {"role": "user", "content": body.input}]
    if not body.input:
        raise RequestError("request", "input", expected="text or messages", got="an empty list")
    return [*head, *(message.plain() for message in body.input)]


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    """text.format in the shape that chat requests use."""
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return None
    schema = None if wanted.schema_ is None else JsonSchema(schema=wanted.schema_)
    return ResponseFormat(type=wanted.type, json_schema=schema)


def _usage(output: RequestOutput) -> ResponsesUsage:
    prompt, completion = len(output.prompt_token_ids), output.outputs[0].length
    return ResponsesUsage(
        input_tokens=prompt,
        input_tokens_details=PromptDetails(cached_tokens=output.cached_tokens),
        output_tokens=completion,
        output_tokens_details=OutputDetails(reasoning_tokens=0),
        total_tokens=prompt + completion,
    )
