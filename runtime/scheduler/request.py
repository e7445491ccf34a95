"""A request and its choices: what is asked, and where each choice stands."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from functools import cached_property

from trtllm_replayssm.runtime.sampling.distribution import TokenHistory
from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs
from trtllm_replayssm.runtime.sampling.mask import GuardedMask
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.scheduler.output import EndRules, FinishReason, OutputBuffer
from trtllm_replayssm.runtime.scheduler.times import RequestTimes
from trtllm_replayssm.runtime.speculative.drafter import NO_DRAFT, Draft
from trtllm_replayssm.runtime.text.tokenizer import Tokenizer
from trtllm_replayssm.spec.philox import choice_seed

__all__ = ["Choice", "FinishReason", "Request", "RequestState", "SamplingParams", "request_seed"]

DEFAULT_PRIORITY = 0.5


class RequestState(str, Enum):
    """Where a choice stands."""

    WAITING = "waiting"  # has no slot and no state yet
    PREFILLING = "prefilling"  # holds a slot; prompt tokens are still to run
    DECODING = "decoding"  # holds a slot; its last output token is the next base
    PREEMPTED = "preempted"  # its state is in host memory
    FINISHED = "finished"


def request_seed(engine_seed: int, serial: int) -> int:
    """The 64-bit seed of a request without one: a hash of the engine's seed and the request's number."""
    digest = hashlib.blake2b(f"{engine_seed}:{serial}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Request:
    """One prompt with its settings and `params.n` choices. The prompt runs once, as choice 0, which is then forked."""

    def __init__(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        rules: EndRules,
        tokenizer: Tokenizer | None = None,
        prompt: str | None = None,
        priority: float = DEFAULT_PRIORITY,
    ) -> None:
        """seed: 64 bits; choice i draws with `choice_seed(seed, i)`. prompt: the text the ids came from, if any.

        priority: 0..1; higher ones get slots first, equal ones in the order of their arrival.
        """
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.rules = rules
        self.priority = priority
        self.seed = seed
        self.own_state = True  # False: it came with its states, which nobody can hold against its tokens
        self.cached_tokens = 0  # prompt tokens that came from the prefix cache
        self.times = RequestTimes()
        self.stop_ids = rules.stop_ids | rules.end_ids
        self.choices = [
            Choice(self, i, choice_seed(seed, i), OutputBuffer(params, rules, tokenizer)) for i in range(params.n)
        ]

    @cached_property
    def prompt_list(self) -> list[int]:
        """The prompt's ids for those who asked; the request itself goes by `prompt_ids`."""
        return list(self.prompt_ids)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return not [choice for choice in self.choices if choice.state is not RequestState.FINISHED]

    def let_go(self) -> None:
        """It has ended, and nobody asks for it any more: of its choices, which know it, none is kept, so that all that
        it holds goes at once and need not wait for the garbage collector.
        """
        self.choices = []


class Choice:
    """One answer to a request: the unit that holds a slot and is scheduled."""

    def __init__(self, request: Request, index: int, seed: int, output: OutputBuffer) -> None:
        self.request = request
        self.index = index
        self.seed = seed
        self.output = output
        mask = request.params.logits_mask
        self.history = TokenHistory(request.prompt_ids, None if mask is None else GuardedMask(mask).fork())
        self.state = RequestState.WAITING
        self.slot: int | None = None
        self.prefilled = 0  # prompt tokens that the slot has absorbed
        self.cuts: tuple[int, ...] = ()  # positions inside the prompt where a chunk must end
        self.pending = 0  # h, records waiting in the slot's ring
        self.draft: Draft = NO_DRAFT
        self._unseen = 0  # drafts that its next step may hold without the host having seen them

    @property
    def held(self) -> int:
        """The slot of a choice that is planned or on the device: it holds one."""
        assert self.slot is not None, "planned choices hold a slot"
        return self.slot

    @property
    def in_prompt(self) -> bool:
        """Whether some of its prompt's tokens are absorbed and others are not."""
        return 0 < self.prefilled < len(self.request.prompt_ids)

    @property
    def width(self) -> int:
        """Slots it stands for: all of its request's until the prompt is forked into the choices, then one."""
        prompt_done = self.prefilled == len(self.request.prompt_ids)
        return 1 if self.index or prompt_done else self.request.params.n

    @property
    def step_tokens(self) -> int:
        """Tokens that its next step holds at most: the base token and drafts, whoever has them."""
        return 1 + max(len(self.draft), self._unseen)

    def move_away(self, max_drafts: int) -> None:
        """It decodes where the host does not see its drafts, up to `max_drafts` a step; the host's own are used up."""
        self.draft, self._unseen = NO_DRAFT, max_drafts

    def move_back(self) -> None:
        """It decodes here again, or ends: its drafts are those of `draft`."""
        self._unseen = 0

    def take(self, token: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Count a token that was drawn elsewhere, in the output and for later draws; returns whether that ends it."""
        self.history.add(token)
        return self.output.push(token, logprobs)

    @property
    def position(self) -> int:
        """Absolute position of the next emitted token."""
        return len(self.request.prompt_ids) + len(self.output.token_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return [*self.request.prompt_ids, *self.output.token_ids]
