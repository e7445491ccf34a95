"""/v1/chat/completions: a conversation in, the next turn out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.llm import CompletionOutput, RequestOutput
from trtllm_replayssm.runtime.server.answers import entries, whole_json, written
from trtllm_replayssm.runtime.server.completions import has_news, usage_of, with_usage
from trtllm_replayssm.runtime.server.logprobs import chat_logprobs
from trtllm_replayssm.runtime.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Reply,
)
from trtllm_replayssm.runtime.server.protocol.common import Usage
from trtllm_replayssm.runtime.server.run import Run
from trtllm_replayssm.runtime.server.sampling import refuse_tools, sampling_params
from trtllm_replayssm.runtime.server.service import Service, new_id
from trtllm_replayssm.runtime.server.stream import DONE, EventStream, Shell, event, unless_gone


@dataclass(frozen=True, slots=True)
class _Call:
    """One accepted request."""

    body: ChatRequest
    id: str
    created: int

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        """A chunk with these choices."""
        return ChatChunk(id=self.id, created=self.created, model=self.body.model, choices=choices, usage=usage)


class Chat:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, body: ChatRequest, request: Request) -> Response:
        """The next turn of a conversation, whole or streamed."""
        service = self._service
        service.check_model(body.model)
        refuse_tools(body.tools, body.tool_choice)
        params = sampling_params(
            body, service.limits, max_tokens=_max_tokens(body), logprobs=_logprobs(body)
        )
        text = await service.render(
            [message.plain() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            extra=body.chat_template_kwargs,
        )
        ids = await service.prompt(
            text, field="messages", add_special_tokens=body.add_special_tokens, keep=body.truncate_prompt_tokens
        )
        run = await service.start_guided(
            [ids], params, body.response_format, streaming=body.stream, priority=body.priority, receive=request.receive
        )
        try:
            call = _Call(body, new_id("chatcmpl-"), int(time.time()))
            if body.stream:
                return EventStream(self._events(call, run), run.close)
            (output,) = await unless_gone(request.receive, run.results())
        except BaseException:
            run.close()
            raise
        run.close()
        text = await written(service, entries([output], params.logprobs), lambda: self._whole(call, output))
        return Response(text, media_type="application/json")

    def _whole(self, call: _Call, output: RequestOutput) -> str:
        choices = (
            ChatChoice(
                index=choice.index,
                message=Reply(role="assistant", content=choice.text),
                token_ids=None if call.body.detokenize else choice.token_ids,
                logprobs=self._scores(call.body, choice),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in output.outputs
        )
        shell = ChatCompletion(
            id=call.id, created=call.created, model=call.body.model, choices=[], usage=usage_of([output])
        )
        return whole_json(shell, choices)

    async def _events(self, call: _Call, run: Run) -> AsyncGenerator[str, None]:
        body, ended = call.body, set[int]()
        shell = Shell(call.chunk([]), usage=with_usage(body))
        latest: RequestOutput | None = None
        for index in range(body.n):
            opening = ChatChunkChoice(index=index, delta=Reply(role="assistant", content=""))
            yield event(shell.around(opening.model_dump_json()))
        async for _, output in run.news():
            latest = output
            for choice in output.outputs:
                if choice.index in ended or not has_news(choice, body.detokenize):
                    continue
                if choice.finish_reason is not None:
                    ended.add(choice.index)
                write = partial(self._news, body, shell, choice)
                yield await written(self._service, entries([output], _logprobs(body)), write)
        if with_usage(body) and latest is not None:
            yield event(call.chunk([], usage_of([latest])).model_dump_json())
        yield DONE

    def _news(self, body: ChatRequest, shell: Shell, choice: CompletionOutput) -> str:
        return event(shell.around(self._piece(body, choice).model_dump_json()))

    def _piece(self, body: ChatRequest, choice: CompletionOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice.index,
            delta=Reply(content=choice.text_diff or None),
            token_ids=None if body.detokenize else choice.token_ids_diff,
            logprobs=self._scores(body, choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _scores(self, body: ChatRequest, choice: CompletionOutput) -> ChatLogprobs | None:
        if not body.logprobs:
            return None
        return chat_logprobs(
            choice.token_ids_diff, choice.logprobs_diff, body.top_logprobs or 0, self._service.names
        )


def _max_tokens(body: ChatRequest) -> int | None:
    """max_completion_tokens is OpenAI's newer name of max_tokens."""
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise RequestError(
            "request", "max_completion_tokens", expected=f"max_tokens = {body.max_tokens} or one of the two", got="both"
        )
    return body.max_completion_tokens


def _logprobs(body: ChatRequest) -> int | None:
    """SamplingParams.logprobs: alternatives per token, None for no scores."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("request", "top_logprobs", expected="logprobs = true beside it", got="logprobs = false")
    return (body.top_logprobs or 0) if body.logprobs else None
