"""Prompt lookup: the request's own text continues as it did the last time its latest tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.speculative.drafter import NO_DRAFT, Draft, DraftContext


class NGramDrafter:
    """Drafts without a model: the most recent earlier match of the longest suffix n-gram gives the continuation."""

    def __init__(self, max_draft_len: int, max_matching_ngram_size: int) -> None:
        """max_draft_len: drafts per step; max_matching_ngram_size: tokens of the longest suffix tried."""
        for name, value in (("max_draft_len", max_draft_len), ("max_matching_ngram_size", max_matching_ngram_size)):
            if value < 1:
                raise ConfigError("NGramDrafter", name, expected="a positive integer", got=value)
        self._max_draft_len = max_draft_len
        self._max_ngram = max_matching_ngram_size

    @property
    def max_draft_len(self) -> int:
        """Drafts per request and step at most."""
        return self._max_draft_len

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft per context; empty where nothing matches."""
        return [self._lookup(c.tokens, min(c.room, self._max_draft_len)) if c.room else NO_DRAFT for c in contexts]

    def _lookup(self, tokens: Sequence[int], count: int) -> Draft:
        match = last_match(tokens, self._max_ngram)
        if match is None:
            return NO_DRAFT
        # The source may run into the draft itself, as an LZ77 copy does: a loop of period 1 still fills the draft.
        source = match + 1
        sequence = list(tokens[source:])
        drafts = [sequence[i] if i < len(sequence) else 0 for i in range(count)]
        for i in range(len(sequence), count):
            drafts[i] = drafts[i - len(sequence)]
        return Draft(tuple(drafts))


def last_match(tokens: Sequence[int], max_ngram: int) -> int | None:
    """Index of the last token of the most recent earlier occurrence of the longest matching suffix, or None.

    Suffixes of max_ngram tokens down to one are tried; an occurrence may overlap the suffix but not be it.
    """
    ids = np.asarray(tokens, np.int64)
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    for back in range(1, max_ngram):
        longer = ends[ends >= back]
        if longer.size:
            longer = longer[ids[longer - back] == ids[-1 - back]]
        if not longer.size:
            break
        ends = longer
    return int(ends[-1]) if ends.size else None
