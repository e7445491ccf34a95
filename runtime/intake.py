"""From a prompt and settings to a request that this engine can run, or a RequestError that says why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any

from trtllm_replayssm.checks import shown
from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.output import EndRules
from trtllm_replayssm.runtime.scheduler.request import DEFAULT_PRIORITY, Request, request_seed
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer

NO_END = -1  # SamplingParams.end_id that stands for "no end token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Limits and defaults that every request is held against. Stateless: may be used from any thread.

    max_seq_len: prompt and output tokens together; max_choices: slots that one request may hold; end_ids: the model's.
    """

    vocab: int
    max_seq_len: int
    max_choices: int
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    seed: int

    def prompt_ids(self, prompt: str | Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        """Token ids of a prompt, tokenised and truncated on the left as the settings say; checked."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "add_request",
                    "prompt",
                    expected="token ids (there is no tokenizer)",
                    got="a string",
                    hint="Put tokenizer.json beside config.json, or pass tokenizer=",
                )
            encoded = self.tokenizer.encode(prompt, add_special_tokens=params.add_special_tokens)
            ids = self._checked("prompt", encoded)  # a tokenizer may know more ids than the model
        else:
            ids = self._checked("prompt", _items(prompt))
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if not ids:
            raise RequestError("add_request", "prompt", expected="at least one token", got="an empty prompt")
        if len(ids) >= self.max_seq_len:
            raise RequestError(
                "add_request",
                "prompt",
                expected=f"at most max_seq_len - 1 = {self.max_seq_len - 1} tokens",
                got=f"{len(ids)} tokens",
                hint="Shorten the prompt, set truncate_prompt_tokens, or raise max_seq_len",
            )
        return ids

    def request(
        self,
        request_id: int,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: float = DEFAULT_PRIORITY,
        seed: int | None = None,
        limit: int | None = None,
    ) -> Request:
        """A request numbered request_id. Raises RequestError; nothing else is touched then.

        seed, limit (output tokens): of a request that began in another engine; None: as the settings say.
        """
        if isinstance(priority, bool) or not isinstance(priority, (int, float)) or not 0 <= priority <= 1:
            raise RequestError("add_request", "priority", expected="a number in 0..1", got=repr(priority))
        ids = self.prompt_ids(prompt, params)
        if params.n > self.max_choices:
            raise RequestError(
                "add_request",
                "n",
                expected=f"at most {self.max_choices} choices (the smaller of max_batch_size and the slots)",
                got=params.n,
            )
        if params.stops and self.tokenizer is None:
            raise RequestError("add_request", "stop", expected="stop_token_ids (there is no tokenizer)", got="strings")
        self._checked("logit_bias", tuple(params.logit_bias or ()))
        room = self.max_seq_len - len(ids)
        if limit is None:
            limit = room if params.max_tokens is None else min(params.max_tokens, room)
        rules = EndRules(
            end_ids=self._end_ids(params),
            stop_ids=frozenset(self._checked("stop_token_ids", params.stop_token_ids or ())),
            limit=limit,
        )
        if seed is None:
            seed = request_seed(self.seed, request_id) if params.seed is None else params.seed
        prompt_text = prompt if isinstance(prompt, str) else None
        return Request(
            request_id,
            ids,
            params,
            seed=seed,
            rules=rules,
            tokenizer=self.tokenizer,
            prompt=prompt_text,
            priority=float(priority),
        )

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        if params.end_id is None:
            return frozenset(self.end_ids)
        if params.end_id == NO_END:
            return frozenset()
        return frozenset(self._checked("end_id", (params.end_id,)))

    def _checked(self, name: str, ids: Iterable[object]) -> tuple[int, ...]:
        given: tuple[Any, ...] = tuple(ids)
        if set(map(type, given)) <= {int} and (not given or (min(given) >= 0 and max(given) < self.vocab)):
            return given  # many cost little this way
        found = []
        for item in given:
            token = _token(item)
            if token is None or not 0 <= token < self.vocab:
                raise RequestError("add_request", name, expected=f"token ids in 0..{self.vocab - 1}", got=shown(item))
            found.append(token)
        return tuple(found)


def _items(prompt: object) -> list[object]:
    """What a prompt that is no text holds."""
    if not isinstance(prompt, (bytes, bytearray, Mapping)):  # these would iterate over something else than token ids
        with suppress(TypeError):
            return list(prompt)  # type: ignore[call-overload, no-any-return]
    raise RequestError("add_request", "prompt", expected="text or a sequence of token ids", got=shown(prompt))


def _token(item: object) -> int | None:
    """The integer of a Python, numpy or torch scalar; None for a float, a boolean, an array, or anything else."""
    plain = item.tolist() if hasattr(item, "tolist") else item
    try:
        return None if isinstance(plain, bool) else index(plain)  # type: ignore[arg-type]  # refused when it is none
    except TypeError:
        return None
