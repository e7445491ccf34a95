"""The model behind the endpoints: names, tokens, templates, grammars, admission. One per server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.types import Receive

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.llm import DEFAULT_PRIORITY, LLM, RequestHandle
from trtllm_replayssm.runtime.sampling.mask import LogitsMask
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.server.errors import GenerationError, NotFoundError
from trtllm_replayssm.runtime.server.grammar import Grammars
from trtllm_replayssm.runtime.server.guided import Guided
from trtllm_replayssm.runtime.server.logprobs import TokenNames
from trtllm_replayssm.runtime.server.meters import Meters
from trtllm_replayssm.runtime.server.offload import Workers
from trtllm_replayssm.runtime.server.protocol.common import ResponseFormat
from trtllm_replayssm.runtime.server.run import STOPPED, Gate, Run
from trtllm_replayssm.runtime.server.schema import is_guided
from trtllm_replayssm.runtime.server.settings import ServerSettings
from trtllm_replayssm.runtime.server.stream import unless_gone
from trtllm_replayssm.runtime.text.chat_template import ChatTemplate
from trtllm_replayssm.runtime.text.token_bytes import TokenBytes
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer

LONG_TEXT = 1024  # characters or ids from which work is moved off the event loop
TEXT_THREADS = 2
CHARACTERS_PER_TOKEN = 16  # of a text that may still fit; ordinary text has about four
POLL_SECONDS = 0.02
ANSWER_SECONDS = 0.5  # for endpoints to say that the server stops
MIN_TOKENS = 1 << 16  # /tokenize and /detokenize do that many, however short the model's sequences are


class Service:
    """What every endpoint shares. Its methods run in the event loop's thread."""

    def __init__(self, llm: LLM, settings: ServerSettings, template: ChatTemplate | None) -> None:
        """template: None for a model without one; the chat endpoints then answer 400."""
        self.llm = llm
        self.settings = settings
        self.limits = settings.limits
        self.template = template
        self.meters = Meters()
        self.gate = Gate(llm.load().max_batch_size, settings.limits)
        self.created = int(time.time())
        self._bytes = None if llm.tokenizer is None else TokenBytes(llm.tokenizer)
        self.names = TokenNames(self._bytes)
        self.guided = Guided(self._grammars, settings.limits)
        self._masks: set[asyncio.Task[LogitsMask]] = set()  # of admitted requests whose schema is not compiled yet
        self._runs: set[Run] = set()
        waiting = self.limits.max_queue_size + 1
        self._texts = Workers("tokenizer", threads=TEXT_THREADS, max_waiting=waiting)
        self._renders = Workers("chat template", threads=1, max_waiting=waiting)
        self.answers = Workers("answers", threads=1, max_waiting=self.gate.limit)
        self.max_tokens_of_text = max(MIN_TOKENS, llm.max_seq_len)
        self._max_characters = max(MIN_TOKENS, CHARACTERS_PER_TOKEN * llm.max_seq_len)

    def check_model(self, name: str | None) -> None:
        """Raise NotFoundError when a request names another model; None passes."""
        if name is not None and name != self.settings.model_name:
            raise NotFoundError("request", "model", expected=repr(self.settings.model_name), got=repr(name[:100]))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError for a model without one."""
        if self.llm.tokenizer is None:
            raise RequestError("request", "prompt", expected="token ids (the model has no tokenizer)", got="text")
        return self.llm.tokenizer

    async def encode(self, text: str, *, field: str, add_special_tokens: bool) -> list[int]:
        """Text of a request's field -> token ids. Raises RequestError for text with a lone surrogate or far too long.

        Long text is tokenised in another thread.
        """
        tokenizer = self.tokenizer
        if len(text) > self._max_characters:
            raise RequestError(
                "request", field, expected=f"at most {self._max_characters} characters (from max_seq_len)",
                got=len(text),
            )  # fmt: skip
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError("request", field, expected="Unicode text", got="a lone surrogate") from error
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        return await self._texts.run(lambda: tokenizer.encode(text, add_special_tokens))

    async def prompt(
        self, given: str | list[int], *, field: str, add_special_tokens: bool = False, keep: int | None = None
    ) -> list[int]:
        """Token ids of a prompt to go on from: the last `keep` of a text's, or of those given. Raises RequestError."""
        if isinstance(given, str):
            given = await self.encode(given, field=field, add_special_tokens=add_special_tokens)
        ids = given if keep is None else given[-keep:]
        if not ids:
            raise RequestError("request", field, expected="at least one token", got="an empty prompt")
        room = self.llm.max_seq_len - 1
        if len(ids) > room:
            raise RequestError(
                "request", field, expected=f"at most max_seq_len - 1 = {room} tokens", got=f"{len(ids)} tokens",
                hint="Shorten the prompt or set truncate_prompt_tokens",
            )  # fmt: skip
        return ids

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, field: str = "tokens") -> str:
        """Token ids -> text; RequestError names an id that the model does not have. Many in another thread."""
        tokenizer, vocab, limit = self.tokenizer, self.llm.geometry.vocab, self.max_tokens_of_text
        if len(ids) > limit:
            raise RequestError("request", "tokens", expected=f"at most {limit} token ids", got=len(ids))
        wrong = min(ids, default=0) if min(ids, default=0) < 0 else max(ids, default=0)
        if not 0 <= wrong < vocab:
            raise RequestError("request", field, expected=f"token ids in 0..{vocab - 1}", got=str(wrong)[:40])
        if len(ids) < LONG_TEXT:
            return tokenizer.decode(ids, skip_special_tokens)
        return await self._texts.run(lambda: tokenizer.decode(ids, skip_special_tokens))

    async def render(
        self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool, extra: dict[str, object] | None
    ) -> str:
        """A conversation as the model's prompt. Raises RequestError for a model without a template."""
        template = self.template
        if template is None:
            raise RequestError("request", "messages", expected="a model with a chat template", got="one without")
        return await self._renders.run(
            lambda: template.render(messages, add_generation_prompt=add_generation_prompt, extra=extra)
        )

    def _grammars(self) -> Grammars:
        geometry = self.llm.geometry
        if self._bytes is None:
            raise RequestError("request", "response_format", expected="text (there is no tokenizer)", got="JSON")
        return Grammars(self._bytes, self._bytes.count or geometry.vocab, geometry.vocab, geometry.eos_ids)

    async def start_guided(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        wanted: ResponseFormat | None,
        *,
        streaming: bool,
        receive: Receive,
        priority: float = DEFAULT_PRIORITY,
    ) -> Run:
        """As `start`, for text that may have to fit a response format: first admitted, then its schema compiles.

        receive: the connection's events. Raises also UnsupportedError, ClientGoneError when the client leaves first.
        """
        if wanted is None or not is_guided(wanted):
            return self.start(prompts, params, streaming=streaming, priority=priority)
        choices = len(prompts) * params.n
        self._admit(choices)
        compiling = asyncio.ensure_future(self.guided.mask(wanted))
        self._masks.add(compiling)
        try:
            mask = await unless_gone(receive, compiling)
        except BaseException as error:
            self.gate.leave(choices)
            if isinstance(error, asyncio.CancelledError) and self.gate.cut:
                raise GenerationError(STOPPED, status=503) from None
            raise
        finally:
            self._masks.discard(compiling)
        return self._launch(prompts, [replace(params, logits_mask=mask)] * len(prompts), streaming, priority)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        streaming: bool,
        priority: float = DEFAULT_PRIORITY,
    ) -> Run:
        """Start prompts (token ids), with one setting for all or one each.

        Raises RequestError, OverloadedError, GenerationError; nothing runs then.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        self._admit(sum(settings.n for settings in each))
        return self._launch(prompts, each, streaming, priority)

    def _admit(self, choices: int) -> None:
        """Take choices in, to be given back to the gate. Raises RequestError, OverloadedError, GenerationError."""
        if self.llm.failure is not None:
            raise GenerationError("the engine stopped", status=500)
        self.gate.enter(choices, self.meters.recent_wait())

    def _launch(
        self, prompts: Sequence[Sequence[int]], each: Sequence[SamplingParams], streaming: bool, priority: float
    ) -> Run:
        """Hand admitted prompts to the engine."""
        choices = sum(settings.n for settings in each)
        handles: list[RequestHandle] = []
        try:
            for ids, settings in zip(prompts, each, strict=True):
                handles.append(self.llm.generate_async(ids, settings, streaming=streaming, priority=priority))
        except BaseException:
            for handle in handles:
                handle.abort()
            self.gate.leave(choices)
            raise

        def ended(run: Run) -> None:
            self._runs.discard(run)
            self.gate.leave(choices)
            self.meters.observe(handle.output for handle in run.handles)

        run = Run(handles, ended)
        self._runs.add(run)
        return run

    async def drain(self) -> None:
        """Admit nobody any more, wait for who was admitted, at most drain_seconds, then `halt`. Returns at the end."""
        self.gate.close(self.limits.drain_seconds)
        while self.gate.inside and not self.gate.cut and self.gate.seconds_left:
            await asyncio.sleep(POLL_SECONDS)
        self.halt()
        deadline = time.monotonic() + ANSWER_SECONDS
        while self.gate.inside and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    def halt(self) -> None:
        """End at once, with an error, whatever has been admitted; nobody is admitted any more."""
        self.gate.close(0.0)
        self.gate.cut = True
        for compiling in tuple(self._masks):
            compiling.cancel()
        for run in tuple(self._runs):
            run.stop()
        self.guided.close()


def new_id(kind: str) -> str:
    """A response id: cmpl-..., chatcmpl-..., resp_..."""
    return f"{kind}{secrets.token_hex(12)}"
