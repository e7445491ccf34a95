"""Counter-based random numbers: Philox4x32-10 (Salmon et al., 2011), and how this package keys them.

Key: the request's 64-bit seed. Counter words: (element // 4, layer << 16 | head, position, domain); an element takes
word `element % 4`. No slot is in the key: moving a request to another slot changes nothing.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


class Domain(IntEnum):
    """What a draw is for; the last counter word, so that no two uses share bits."""

    STATE = 1  # stochastic rounding of a checkpoint
    TOKEN = 2  # the token drawn at a position
    ACCEPT = 3  # accept or reject a draft at a position
    RESIDUAL = 4  # the token drawn after a rejected draft
    DRAFT = 5  # the token a sampling drafter draws


def philox4x32(counter: NDArray[np.uint32], seed: int) -> NDArray[np.uint32]:
    """Ten rounds over counters [..., 4] uint32 with the 64-bit key `seed` -> [..., 4] uint32."""
    words = _rounds([counter[..., i].astype(np.uint64) for i in range(4)], seed)
    return np.stack(words, axis=-1).astype(np.uint32)


def _rounds(c: list[Any], seed: int) -> list[Any]:
    """The ten rounds on four counter words: Python integers below 2^32, or uint64 arrays of such."""
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        product0, product1 = c[0] * MULTIPLIERS[0], c[2] * MULTIPLIERS[1]
        c = [
            (product1 >> 32) ^ c[1] ^ key[0],
            product1 & _MASK,
            (product0 >> 32) ^ c[3] ^ key[1],
            product0 & _MASK,
        ]
        key = [(k + w) & _MASK for k, w in zip(key, WEYL, strict=True)]
    return c


def state_words(
    seed: int, layer: int, heads: int, elems: int, position: int, *, first_head: int = 0
) -> NDArray[np.uint32]:  # fmt: skip
    """Random words [heads, elems] for one layer's checkpoint that has absorbed `position` tokens.

    elems = P * N per head, element = p * N + n; a multiple of four is not required. first_head: of the model's heads.
    """
    quads = -(-elems // 4)
    counter = np.zeros((heads, quads, 4), np.uint32)
    counter[..., 0] = np.arange(quads, dtype=np.uint32)
    counter[..., 1] = (np.uint32(layer << 16) | np.arange(first_head, first_head + heads, dtype=np.uint32))[:, None]
    counter[..., 2] = np.uint32(position)
    counter[..., 3] = np.uint32(Domain.STATE)
    return philox4x32(counter, seed).reshape(heads, quads * 4)[:, :elems]


def uniform(seed: int, position: int, domain: Domain) -> float:
    """One uniform number in [0, 1) with 53 bits for a request's absolute position."""
    words = _rounds([0, 0, int(position), int(domain)], int(seed))
    return float((words[0] >> 5) * 67108864 + (words[1] >> 6)) / 9007199254740992.0


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's `n` choices; choice 0 keeps the user's seed."""
    if choice == 0:
        return seed
    words = _rounds([int(choice), 0, 0, 0], int(seed))
    return int(words[0] | words[1] << 32)
