"""Prefix reuse in an engine: begins prompts at snapshots, says where chunks must end, and offers new snapshots.

A snapshot inside a prompt holds the float32 state between two chunks, so no rounding and no seed is in it: every
request with these tokens may begin there, whatever its seed, penalties or number of choices.
"""

from __future__ import annotations

from collections.abc import Callable

from trtllm_replayssm.runtime.prefix.cache import Hit, PrefixCache
from trtllm_replayssm.runtime.prefix.history import PrefixHistory
from trtllm_replayssm.runtime.prefix.keys import BlockKeys
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig, PrefixStats
from trtllm_replayssm.runtime.scheduler.request import Choice, FinishReason
from trtllm_replayssm.runtime.session.base import Session, SlotSnapshot


class PrefixReuse:
    """The prefix cache of one engine, in terms of its session and its choices."""

    def __init__(self, session: Session, config: PrefixConfig, stats: PrefixStats) -> None:
        self.config = config
        self.cache = PrefixCache(config, session.signature, stats)
        self._session = session
        self._stats = stats
        self._history = PrefixHistory(config.history)
        self._keys: dict[Choice, BlockKeys] = {}  # of prompts in progress, and of the next one

    def knows(self, choice: Choice) -> bool:
        """Whether a new choice would begin at a snapshot now."""
        return self._find(choice) is not None

    def _find(self, choice: Choice) -> Hit | None:
        """At least one token of the prompt is left to run: its logits are wanted."""
        return self.cache.find(self._keys_of(choice), len(choice.request.prompt_ids) - 1)

    def begin(self, choice: Choice) -> int:
        """A slot for a new choice, with the longest known part of its prompt absorbed. Raises CapacityError."""
        prompt, keys, hit = choice.request.prompt_ids, self._keys_of(choice), self._find(choice)
        if hit is None:
            slot = self._session.allocate(choice.seed)
        else:
            slot = self._session.restore(hit.snapshot, seed=choice.seed, before=hit.before)
            self.cache.used(hit)
            choice.prefilled = choice.request.cached_tokens = hit.position
            self._stats.hits += 1
            self._stats.hit_tokens += hit.position
        self._stats.lookups += 1
        choice.cuts = self._cuts(keys, len(prompt))
        self._history.add(keys)
        return slot

    def _cuts(self, keys: BlockKeys, length: int) -> tuple[int, ...]:
        """Where a chunk must end: where this prompt parts from earlier ones, and at the last boundary inside it."""
        last = (length - 1) // self.config.block
        return tuple(sorted({n * self.config.block for n in (min(self._history.shared(keys), last), last) if n}))

    def offer_prompt(self, choice: Choice) -> None:
        """A chunk of a prompt has run; snapshot it where it ended on a block boundary inside the prompt.

        Where it need not have ended there, only when nothing has to be dropped for it.
        """
        if choice.slot is None or choice.prefilled % self.config.block or not choice.request.own_state:
            return
        if not choice.in_prompt:
            return
        if choice.prefilled not in choice.cuts and not self.cache.has_room:
            return
        self.cache.offer(self._keys_of(choice), choice.prefilled, self._saver(choice.slot))

    def offer_output(self, choice: Choice) -> None:
        """A choice has ended; snapshot what its slot has absorbed, every token but the last, for the next turn."""
        if choice.slot is None or not self.config.outputs or not choice.request.own_state:
            return
        if choice.output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            absorbed = choice.tokens[:-1]
            self.cache.offer(self.cache.keys(absorbed), len(absorbed), self._saver(choice.slot))

    def distrust(self, choice: Choice) -> None:
        """A choice's logits are no numbers: its prompt's prefixes may be why, and are forgotten."""
        if choice.request.own_state:
            self.cache.drop(self._keys_of(choice), len(choice.request.prompt_ids))

    def end(self, choice: Choice) -> None:
        """A choice gives up its slot for good."""
        self._keys.pop(choice, None)

    def _keys_of(self, choice: Choice) -> BlockKeys:
        if choice not in self._keys:
            self._keys[choice] = self.cache.keys(choice.request.prompt_ids)
        return self._keys[choice]

    def _saver(self, slot: int) -> Callable[[int], SlotSnapshot]:
        return lambda since: self._session.save(slot, since)
