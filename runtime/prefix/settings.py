"""What a prefix cache is told at start, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_replayssm.errors import ConfigError

DEFAULT_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """block: tokens between two places where a snapshot may be taken; budget: bytes of host memory for all of them.

    outputs: also keep what a finished request's slot holds, for the next turn of its conversation. That state went
    through the roundings of decoding; without it a hit gives the bits that the same chunks would have given.
    history: block keys remembered without a snapshot, to see which prompts begin alike.
    """

    block: int = DEFAULT_BLOCK
    budget: int
    outputs: bool = False
    history: int = 1 << 16

    def __post_init__(self) -> None:
        for name in ("block", "budget", "history"):
            if getattr(self, name) < 1:
                raise ConfigError("PrefixConfig", name, expected="a positive integer", got=getattr(self, name))


@dataclass(slots=True)
class PrefixStats:
    """Counters of one cache.

    lookups: prompts that started; hits: those that started from a snapshot; hit_tokens: prompt tokens not run again.
    insertions: snapshots taken in; evictions: states dropped for room; refused: snapshots that the budget cannot hold
    beside the keys and values that they need. entries: snapshots with state now; bytes: host memory of the cache now.
    """

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    insertions: int = 0
    evictions: int = 0
    refused: int = 0
    entries: int = 0
    bytes: int = 0

    def as_dict(self) -> dict[str, object]:
        """The counters under names of their own, ready for JSON."""
        return {f"prefix_{name}": getattr(self, name) for name in self.__slots__}
