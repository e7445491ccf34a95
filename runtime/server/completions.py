"""/v1/completions: text or token ids in, what follows them out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from trtllm_replayssm.errors import RequestError, UnsupportedError
from trtllm_replayssm.runtime.llm import CompletionOutput, RequestOutput
from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs
from trtllm_replayssm.runtime.server.answers import entries, whole_json, written
from trtllm_replayssm.runtime.server.logprobs import completion_logprobs, joined, prompt_logprobs
from trtllm_replayssm.runtime.server.protocol.common import SamplingFields, Usage
from trtllm_replayssm.runtime.server.protocol.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from trtllm_replayssm.runtime.server.run import Run
from trtllm_replayssm.runtime.server.sampling import sampling_params, within
from trtllm_replayssm.runtime.server.scoring import prompt_scores
from trtllm_replayssm.runtime.server.service import Service, new_id
from trtllm_replayssm.runtime.server.stream import DONE, EventStream, Shell, event, unless_gone


@dataclass(frozen=True, slots=True)
class _Head:
    """The echo of a prompt: its text and, where asked for, the scores of its tokens."""

    text: str = ""
    scores: CompletionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """One accepted request. heads: what echo puts before each prompt's choices.

    offsets: characters of a choice's tokens so far, by its number; kept while scores are written.
    """

    body: CompletionRequest
    heads: Sequence[_Head]
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict)

    def part(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        """A response or chunk with these choices."""
        return Completion(id=self.id, created=self.created, model=self.body.model, choices=choices, usage=usage)

    def shell(self) -> Shell:
        """What the chunks of its stream have in common."""
        return Shell(self.part([]), usage=with_usage(self.body))


class Completions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, body: CompletionRequest, request: Request) -> Response:
        """Text that goes on from a prompt, whole or streamed."""
        service = self._service
        service.check_model(body.model)
        _check(body)
        params = sampling_params(
            body, service.limits, max_tokens=body.max_tokens or None, logprobs=body.logprobs
        )
        prompts = await self._prompts(body)
        scored = body.echo and body.logprobs is not None
        scores = await unless_gone(request.receive, self._scores(body, prompts)) if scored else None
        if body.max_tokens == 0:
            return await self._echo(_Call(body, await self._heads(body, prompts, scores)), prompts)
        run = await service.start_guided(
            prompts, params, body.response_format, streaming=body.stream, priority=body.priority,
            receive=request.receive,
        )  # fmt: skip
        try:
            call = _Call(body, await self._heads(body, prompts, scores))
            if body.stream:
                return EventStream(self._events(call, run), run.close)
            outputs = await unless_gone(request.receive, run.results())
        except BaseException:
            run.close()
            raise
        run.close()
        text = await written(service, entries(outputs, body.logprobs), lambda: self._whole(call, outputs))
        return Response(text, media_type="application/json")

    async def _scores(self, body: CompletionRequest, prompts: list[list[int]]) -> list[list[TokenLogprobs]]:
        return await prompt_scores(self._service, prompts, body.logprobs or 0, body.priority)

    async def _echo(self, call: _Call, prompts: list[list[int]]) -> Response:
        """The prompts themselves: nothing is generated."""
        body, usage = call.body, Usage.of(sum(len(ids) for ids in prompts), 0, 0)
        choices = [
            CompletionChoice(index=i, text=head.text, logprobs=head.scores, finish_reason="length")
            for i, head in enumerate(head for head in call.heads for _ in range(body.n))
        ]
        if not body.stream:
            return Response(whole_json(call.part([], usage), choices), media_type="application/json")

        async def events() -> AsyncGenerator[str, None]:
            shell = call.shell()
            for choice in choices:
                yield event(shell.around(choice.model_dump_json()))
            if with_usage(body):
                yield event(call.part([], usage).model_dump_json())
            yield DONE

        return EventStream(events(), lambda: None)

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

    async def _heads(
        self, body: CompletionRequest, prompts: list[list[int]], scores: list[list[TokenLogprobs]] | None
    ) -> list[_Head]:
        if not body.echo:
            return [_Head()] * len(prompts)
        names, heads = self._service.names, []
        for i, ids in enumerate(prompts):
            if body.truncate_prompt_tokens is None and isinstance(body.prompt, str):
                text = body.prompt
            else:
                text = await self._service.decode(ids, skip_special_tokens=False, field="prompt")
            if scores is None:
                heads.append(_Head(text))
            else:
                write = partial(prompt_logprobs, ids, scores[i], body.logprobs or 0, names)
                heads.append(_Head(text, await written(self._service, len(ids) * (2 + (body.logprobs or 0)), write)))
        return heads

    def _whole(self, call: _Call, outputs: Sequence[RequestOutput]) -> str:
        choices = (
            self._choice(call, i, choice, first=True) for i, output in enumerate(outputs) for choice in output.outputs
        )
        return whole_json(call.part([], usage_of(outputs)), choices)

    async def _events(self, call: _Call, run: Run) -> AsyncGenerator[str, None]:
        body, latest = call.body, {}
        begun: set[int] = set()
        ended: set[int] = set()
        shell = call.shell()
        async for i, output in run.news():
            latest[i] = output
            for choice in output.outputs:
                number = i * body.n + choice.index
                if number in ended or not has_news(choice, body.detokenize):
                    continue
                write = partial(self._news, call, shell, i, choice, number not in begun)
                begun.add(number)
                if choice.finish_reason is not None:
                    ended.add(number)
                yield await written(self._service, entries([output], body.logprobs), write)
        if with_usage(body):
            yield event(call.part([], usage_of(list(latest.values()))).model_dump_json())
        yield DONE

    def _news(self, call: _Call, shell: Shell, prompt: int, choice: CompletionOutput, first: bool) -> str:
        return event(shell.around(self._choice(call, prompt, choice, first=first).model_dump_json()))

    def _choice(self, call: _Call, prompt: int, choice: CompletionOutput, *, first: bool) -> CompletionChoice:
        """What is new of a choice; of a whole response, all of it."""
        body, head = call.body, call.heads[prompt] if first else _Head()
        number = prompt * body.n + choice.index
        scores = self._logprobs(call, number, choice, head.scores)
        return CompletionChoice(
            index=number,
            text=head.text + choice.text_diff,
            token_ids=None if body.detokenize else choice.token_ids_diff,
            logprobs=scores if head.scores is None or scores is None else joined(head.scores, scores),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _logprobs(
        self, call: _Call, number: int, choice: CompletionOutput, head: CompletionLogprobs | None
    ) -> CompletionLogprobs | None:
        top, names = call.body.logprobs, self._service.names
        if top is None:
            return None
        before = call.offsets.get(number, 0) if head is None else sum(map(len, head.tokens))
        found = completion_logprobs(choice.token_ids_diff, choice.logprobs_diff, top, before, names)
        call.offsets[number] = before + sum(map(len, found.tokens))
        return found


def _check(body: CompletionRequest) -> None:
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("request", "max_tokens", expected="at least 1, or echo beside 0", got=0)
    if body.echo and not body.detokenize:
        raise UnsupportedError("request", "echo", expected="detokenize = true beside it", got="false")


def has_news(choice: CompletionOutput, detokenize: bool) -> bool:
    """Whether a chunk is due: text (or tokens, where no text is asked for), scores, or the end."""
    tokens = choice.length_diff if choice.scores is not None or not detokenize else 0
    return bool(choice.has_text_diff or tokens or choice.finish_reason)


def with_usage(body: SamplingFields) -> bool:
    """Whether a stream ends with the token counts."""
    return body.stream_options is not None and body.stream_options.include_usage


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Counts over all prompts and choices; a prompt with n choices ran once and counts once."""
    return Usage.of(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(choice.length for output in outputs for choice in output.outputs),
        sum(output.cached_tokens for output in outputs),
    )
