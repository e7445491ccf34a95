"""/v1/completions: text or token ids in, what follows them out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from trtllm_replayssm.errors import RequestError, UnsupportedError
from trtllm_replayssm.runtime.llm import CompletionOutput, RequestOutput
from trtllm_replayssm.runtime.server.logprobs import completion_logprobs
from trtllm_replayssm.runtime.server.protocol.common import Usage
from trtllm_replayssm.runtime.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from trtllm_replayssm.runtime.server.run import Run
from trtllm_replayssm.runtime.server.sampling import sampling_params, within
from trtllm_replayssm.runtime.server.service import Service, new_id
from trtllm_replayssm.runtime.server.stream import DONE, EventStream, event, unless_gone


@dataclass(frozen=True, slots=True)
class _Call:
    """One accepted request. heads: the text that echo puts before each prompt's choices."""

    body: CompletionRequest
    heads: Sequence[str]
    id: str
    created: int

    def part(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        """A response or chunk with these choices."""
        return Completion(id=self.id, created=self.created, model=self.body.model, choices=choices, usage=usage)


class Completions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, body: CompletionRequest, request: Request) -> Response:
        """Text that goes on from a prompt, whole or streamed."""
        service = self._service
        service.check_model(body.model)
        _check(body)
        mask = await service.mask(body.response_format)
        params = sampling_params(
            body, service.limits, max_tokens=body.max_tokens, logprobs=body.logprobs, mask=mask
        )
        prompts = await self._prompts(body)
        run = service.start(prompts, params, streaming=body.stream, priority=body.priority)
        try:
            call = _Call(body, self._heads(body, run), new_id("cmpl-"), int(time.time()))
            if body.stream:
                return EventStream(self._events(call, run), run.close)
            outputs = await unless_gone(request.receive, run.results())
        except BaseException:
            run.close()
            raise
        run.close()
        return Response(self._whole(call, outputs).model_dump_json(), media_type="application/json")

    async def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt."""
        given = body.prompt
        prompts: Sequence[str | list[int]]
        if isinstance(given, str):
            prompts = [given]
        elif not given:
            raise RequestError("request", "prompt", expected="text or token ids", got="an empty list")
        else:
            single = isinstance(given[0], int)
            prompts = [cast(list[int], given)] if single else cast(list[str] | list[list[int]], given)
        within("prompt", len(prompts), self._service.limits.max_prompts)
        return [
            await self._service.prompt(
                item, field="prompt", add_special_tokens=body.add_special_tokens, keep=body.truncate_prompt_tokens
            )
            for item in prompts
        ]

    def _heads(self, body: CompletionRequest, run: Run) -> list[str]:
        if not body.echo:
            return [""] * len(run.handles)
        if body.truncate_prompt_tokens is None and isinstance(body.prompt, str):
            return [body.prompt]
        return [self._service.tokenizer.decode(handle.prompt_token_ids, False) for handle in run.handles]

    def _whole(self, call: _Call, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            self._choice(call, i, choice, first=True) for i, output in enumerate(outputs) for choice in output.outputs
        ]
        return call.part(choices, usage_of(outputs))

    async def _events(self, call: _Call, run: Run) -> AsyncGenerator[str, None]:
        body, latest = call.body, {}
        begun: set[int] = set()
        ended: set[int] = set()
        usage = body.stream_options is not None and body.stream_options.include_usage
        leave_out = frozenset() if usage else frozenset({"usage"})
        async for i, output in run.news():
            latest[i] = output
            for choice in output.outputs:
                number = i * body.n + choice.index
                if number in ended or not has_news(choice, body.detokenize):
                    continue
                part = self._choice(call, i, choice, first=number not in begun)
                begun.add(number)
                if choice.finish_reason is not None:
                    ended.add(number)
                yield event(call.part([part]), leave_out=leave_out)
        if usage:
            yield event(call.part([], usage_of(list(latest.values()))))
        yield DONE

    def _choice(self, call: _Call, prompt: int, choice: CompletionOutput, *, first: bool) -> CompletionChoice:
        """What is new of a choice; of a whole response, all of it."""
        body = call.body
        return CompletionChoice(
            index=prompt * body.n + choice.index,
            text=(call.heads[prompt] if first else "") + choice.text_diff,
            token_ids=None if body.detokenize else choice.token_ids_diff,
            logprobs=self._logprobs(body, choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _logprobs(self, body: CompletionRequest, choice: CompletionOutput) -> CompletionLogprobs | None:
        if body.logprobs is None:
            return None
        new, names = choice.token_ids_diff, self._service.names
        before = choice.token_ids[: choice.length - len(new)]
        offset = sum(len(names.text(token)) for token in before)
        return completion_logprobs(new, choice.logprobs_diff, body.logprobs, offset, names)


def _check(body: CompletionRequest) -> None:
    if body.echo and body.logprobs is not None:
        raise UnsupportedError("request", "echo", expected="no logprobs beside it (prompts are not scored)", got="both")
    if body.echo and not body.detokenize:
        raise UnsupportedError("request", "echo", expected="detokenize = true beside it", got="false")


def has_news(choice: CompletionOutput, detokenize: bool) -> bool:
    """Whether a chunk is due: text (or tokens, where no text is asked for), scores, or the end."""
    tokens = choice.token_ids_diff if choice.logprobs is not None or not detokenize else ()
    return bool(choice.text_diff or tokens or choice.finish_reason)


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Counts over all prompts and choices; a prompt with n choices ran once and counts once."""
    return Usage.of(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(choice.length for output in outputs for choice in output.outputs),
        sum(output.cached_tokens for output in outputs),
    )
