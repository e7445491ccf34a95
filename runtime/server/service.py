"""The model behind the endpoints: names, tokens, templates, grammars, admission. One per server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.llm import DEFAULT_PRIORITY, LLM, RequestHandle
from trtllm_replayssm.runtime.sampling.mask import LogitsMask
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.server.errors import GenerationError, NotFoundError
from trtllm_replayssm.runtime.server.grammar import Grammars
from trtllm_replayssm.runtime.server.logprobs import TokenNames
from trtllm_replayssm.runtime.server.meters import Meters
from trtllm_replayssm.runtime.server.offload import Workers
from trtllm_replayssm.runtime.server.protocol.common import ResponseFormat
from trtllm_replayssm.runtime.server.run import Gate, Run
from trtllm_replayssm.runtime.server.settings import ServerSettings
from trtllm_replayssm.runtime.text.chat_template import ChatTemplate
from trtllm_replayssm.runtime.text.token_bytes import TokenBytes
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer

LONG_TEXT = 1024  # characters or ids from which work is moved off the event loop
TEXT_THREADS = 2
CHARACTERS_PER_TOKEN = 16  # of a text that may still fit; ordinary text has about four
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
        self._grammars: Grammars | None = None
        self._compiling = asyncio.Lock()
        self._runs: set[Run] = set()
        waiting = self.limits.max_queue_size + 1
        self._texts = Workers("tokenizer", threads=TEXT_THREADS, max_waiting=waiting)
        self._renders = Workers("chat template", threads=1, max_waiting=waiting)
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
        room = self.llm.max_seq_len - 1
        if len(ids) > room:
            raise RequestError(
                "request", field, expected=f"at most max_seq_len - 1 = {room} tokens", got=f"{len(ids)} tokens",
                hint="Shorten the prompt or set truncate_prompt_tokens",
            )  # fmt: skip
        return ids

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Token ids -> text; RequestError names an id that the model does not have. Many in another thread."""
        tokenizer, vocab, limit = self.tokenizer, self.llm.geometry.vocab, self.max_tokens_of_text
        if len(ids) > limit:
            raise RequestError("request", "tokens", expected=f"at most {limit} token ids", got=len(ids))
        wrong = min(ids, default=0) if min(ids, default=0) < 0 else max(ids, default=0)
        if not 0 <= wrong < vocab:
            raise RequestError("request", "tokens", expected=f"token ids in 0..{vocab - 1}", got=str(wrong)[:40])
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

    async def mask(self, wanted: ResponseFormat | None) -> LogitsMask | None:
        """The token mask of a response format; None for plain text. Compiles in another thread."""
        if wanted is None or wanted.type == "text":
            return None
        async with self._compiling:
            return await asyncio.to_thread(self._mask, wanted)

    def prepare_grammars(self) -> Grammars:
        """The grammar compiler; slow the first time. Raises UnsupportedError or RequestError where there is none."""
        if self._grammars is None:
            geometry = self.llm.geometry
            if self._bytes is None:
                raise RequestError("request", "response_format", expected="text (there is no tokenizer)", got="JSON")
            known = self._bytes.count or geometry.vocab
            self._grammars = Grammars(self._bytes, known, geometry.vocab, geometry.eos_ids)
        return self._grammars

    def _mask(self, wanted: ResponseFormat) -> LogitsMask:
        return self.prepare_grammars().mask(wanted, self.limits.schema_bytes)

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
        if self.llm.failure is not None:
            raise GenerationError("the engine stopped", status=500)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        choices = sum(settings.n for settings in each)
        self.gate.enter(choices, self.meters.recent_wait())
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
        """Admit nobody any more, wait for what runs, at most drain_seconds; then abort it. Returns when all ended."""
        self.gate.stopping = True
        deadline = time.monotonic() + self.limits.drain_seconds
        while self._runs and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for run in tuple(self._runs):
            for handle in run.handles:
                handle.abort()
        deadline = time.monotonic() + 1.0  # their endpoints answer 503 now
        while self._runs and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def new_id(kind: str) -> str:
    """A response id: cmpl-..., chatcmpl-..., resp_..."""
    return f"{kind}{secrets.token_hex(12)}"
