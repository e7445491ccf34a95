"""Names of token prefixes: a chain of digests over blocks, so that equal names mean equal tokens from the start on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

Key = bytes


class BlockKeys:
    """Keys of one token sequence. A key is 32 bytes: two prefixes that differ share one by no accident."""

    def __init__(self, root: Key, block: int, tokens: Sequence[int]) -> None:
        """root: names everything else that the state depends on, see `root_key`; block: tokens of a block."""
        self.block = block
        self._tokens = tuple(tokens)
        self._chain = [root]
        for begin in range(0, len(self._tokens) - block + 1, block):
            self._chain.append(_digest(self._chain[-1], self._tokens[begin : begin + block]))

    @property
    def boundaries(self) -> int:
        """Whole blocks."""
        return len(self._chain) - 1

    def boundary(self, index: int) -> Key:
        """Key of the first `index` blocks; index 0 is the root."""
        return self._chain[index]

    def at(self, position: int) -> Key:
        """Key of the first `position` tokens, inside a block too."""
        index, rest = divmod(position, self.block)
        if not rest:
            return self._chain[index]
        return _digest(self._chain[index], self._tokens[index * self.block : position])


def root_key(signature: str) -> Key:
    """The key of the empty prefix: model, formats and shapes, as a session's signature names them."""
    return blake2b(signature.encode(), digest_size=32).digest()


def _digest(parent: Key, tokens: Sequence[int]) -> Key:
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=32).digest()
