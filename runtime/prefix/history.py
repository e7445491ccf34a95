"""Which prompt beginnings have been seen before: where two prompts part, a snapshot will be of use to a third."""

from __future__ import annotations

from collections import OrderedDict

from trtllm_replayssm.runtime.prefix.keys import BlockKeys, Key


class PrefixHistory:
    """The most recent block keys, without state: 32 bytes each instead of a snapshot."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def shared(self, keys: BlockKeys) -> int:
        """Leading blocks of a sequence that an earlier one had too."""
        count = 0
        while count < keys.boundaries and keys.boundary(count + 1) in self._seen:
            count += 1
        return count

    def add(self, keys: BlockKeys) -> None:
        """Remember a sequence's blocks, the first ones longest."""
        for index in range(keys.boundaries, 0, -1):
            key = keys.boundary(index)
            self._seen.pop(key, None)
            self._seen[key] = None
        while len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
