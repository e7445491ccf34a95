"""The prefix cache: snapshots by the tokens that they have absorbed, within a budget of host memory.

An entry holds a slot's state at its position, and the keys and values since its parent, the deepest entry before it on
the same tokens: nested prefixes share what they have in common. The parent's last position is held again: a drafting
head pairs it with the token after it, which is not part of the parent's key. State is most of an entry. When room is
needed the
state that is worth least is dropped; its keys and values stay while deeper entries need them, and such an entry is no
hit: without the state its tokens are run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_replayssm.errors import InvariantError
from trtllm_replayssm.runtime.prefix.keys import BlockKeys, Key, root_key
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig, PrefixStats
from trtllm_replayssm.runtime.session.base import SlotSnapshot


@dataclass(slots=True, eq=False)
class Entry:
    """base: key of the last block boundary at or before the position. born: the cache's clock when last used.

    size: bytes it holds now; kv_size: bytes that are left of it without its state.
    """

    key: Key
    base: Key
    position: int
    snapshot: SlotSnapshot
    parent: Entry | None
    born: float
    size: int
    kv_size: int
    has_state: bool = True
    children: int = 0
    hits: int = 0

    def chain(self) -> list[Entry]:
        """The entries before it, from the first position on."""
        found, at = [], self.parent
        while at is not None:
            found.append(at)
            at = at.parent
        return found[::-1]

    @property
    def first(self) -> int:
        """First position whose keys and values it holds."""
        return 0 if self.parent is None else self.parent.position - 1


@dataclass(frozen=True, slots=True)
class Hit:
    """What `Session.restore` needs to begin a prompt at `position`."""

    entry: Entry
    before: list[SlotSnapshot]

    @property
    def snapshot(self) -> SlotSnapshot:
        """The state, with the last of the keys and values."""
        return self.entry.snapshot

    @property
    def position(self) -> int:
        """Tokens it has absorbed."""
        return self.entry.position


class PrefixCache:
    """Entries of one session. Not thread-safe; the engine's thread owns it."""

    def __init__(self, config: PrefixConfig, signature: str, stats: PrefixStats) -> None:
        self.config = config
        self.stats = stats
        self._root = root_key(signature)
        self._entries: dict[Key, Entry] = {}
        self._tails: dict[Key, Counter[int]] = {}  # by base: lengths of the entries that end inside the next block
        self._clock = 0.0
        self._largest = 0  # bytes of the largest snapshot so far

    @property
    def has_room(self) -> bool:
        """Whether one more snapshot like the others fits without dropping any."""
        return self.stats.bytes + self._largest <= self.config.budget

    def keys(self, tokens: tuple[int, ...] | list[int]) -> BlockKeys:
        """Keys of a sequence under this cache's root."""
        return BlockKeys(self._root, self.config.block, tokens)

    def find(self, keys: BlockKeys, limit: int) -> Hit | None:
        """The deepest state of at most `limit` tokens of the sequence."""
        entry = self._deepest(keys, limit, with_state=True)
        return None if entry is None else Hit(entry, [part.snapshot for part in entry.chain()])

    def used(self, hit: Hit) -> None:
        """A prompt did start from it."""
        hit.entry.hits += 1
        hit.entry.born = self._clock

    def offer(self, keys: BlockKeys, position: int, save: Callable[[int], SlotSnapshot]) -> None:
        """Take in the state of the first `position` tokens. save(since) is called only when it is wanted."""
        key = keys.at(position)
        known = self._entries.get(key)
        if known is not None and known.has_state:
            known.born = self._clock
            return
        parent = known.parent if known is not None else self._deepest(keys, position - 1, with_state=False)
        since = 0 if parent is None else parent.position - 1
        snapshot = save(since)
        if (snapshot.position, snapshot.first) != (position, since):
            raise InvariantError(
                "prefix cache", "snapshot", expected=f"positions {since}..{position}, as its key says",
                got=f"{snapshot.first}..{snapshot.position}",
            )  # fmt: skip
        size, kv_size = snapshot.nbytes, snapshot.kv_only().nbytes
        self._largest = max(self._largest, size)
        above = 0 if parent is None else parent.kv_size + sum(part.kv_size for part in parent.chain())
        if size + above > self.config.budget:
            self.stats.refused += 1
        elif known is None:
            base = keys.boundary(position // keys.block)
            self._insert(Entry(key, base, position, snapshot, parent, self._clock, size, kv_size))
        else:
            self._revive(known, snapshot, size)

    def drop(self, keys: BlockKeys, limit: int) -> None:
        """Forget the states of prefixes of a sequence that turned out broken."""
        while (entry := self._deepest(keys, limit, with_state=True)) is not None:
            self._drop_state(entry)

    def _deepest(self, keys: BlockKeys, limit: int, *, with_state: bool) -> Entry | None:
        for index in range(min(keys.boundaries, limit // keys.block), -1, -1):
            base = keys.boundary(index)
            lengths = [n for n in self._tails.get(base, ()) if index * keys.block + n <= limit]
            tails = [keys.at(index * keys.block + n) for n in sorted(lengths, reverse=True)]
            for key in (*tails, base):
                entry = self._entries.get(key)
                if entry is not None and (entry.has_state or not with_state):
                    return entry
        return None

    def _insert(self, entry: Entry) -> None:
        if entry.parent is not None:
            entry.parent.children += 1  # from here on its keys and values are needed, and not dropped below
        self._make_room(entry.size)
        self._entries[entry.key] = entry
        if entry.key != entry.base:
            self._tails.setdefault(entry.base, Counter())[entry.position % self.config.block] += 1
        self._count(entry.size, entries=1)
        self.stats.insertions += 1

    def _revive(self, entry: Entry, snapshot: SlotSnapshot, size: int) -> None:
        """Give a known prefix its state again."""
        more = size - entry.size
        entry.children += 1  # not to be dropped while room is made for it
        self._make_room(more)
        entry.children -= 1
        entry.snapshot, entry.size, entry.has_state, entry.born = snapshot, size, True, self._clock
        self._count(more, entries=1)
        self.stats.insertions += 1

    def _make_room(self, wanted: int) -> None:
        while self.stats.bytes + wanted > self.config.budget:
            victim = min((e for e in self._entries.values() if e.has_state), key=self._worth, default=None)
            if victim is None:
                raise InvariantError("prefix cache", "bytes", expected="states to drop", got=self.stats.bytes)
            self._clock = max(self._clock, self._worth(victim))
            self._drop_state(victim)
            self.stats.evictions += 1

    def _worth(self, entry: Entry) -> float:
        """GreedyDual-Size-Frequency: tokens to run again without this state, per byte, times its uses, above the clock.

        The clock rises to the worth of what was dropped last, so that what is not used any more falls behind.
        """
        below = entry.parent
        while below is not None and not below.has_state:
            below = below.parent
        tokens = entry.position - (0 if below is None else below.position)
        return entry.born + (1 + entry.hits) * tokens / max(entry.size, 1)

    def _drop_state(self, entry: Entry) -> None:
        self._count(entry.kv_size - entry.size, entries=-1)
        entry.snapshot, entry.size, entry.has_state = entry.snapshot.kv_only(), entry.kv_size, False
        leaf: Entry | None = entry
        while leaf is not None and not leaf.has_state and not leaf.children:
            self._remove(leaf)
            leaf = leaf.parent

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._count(-entry.size)
        if entry.parent is not None:
            entry.parent.children -= 1
        if entry.key != entry.base:
            lengths, length = self._tails[entry.base], entry.position % self.config.block
            lengths[length] -= 1
            if not lengths[length]:
                del lengths[length]
            if not lengths:
                del self._tails[entry.base]

    def _count(self, size: int, entries: int = 0) -> None:
        self.stats.bytes += size
        self.stats.entries += entries

    def check_integrity(self) -> None:
        """Raise InvariantError when bytes, parents, tails or positions do not add up, or the budget is exceeded."""
        entries, children, tails = self._entries.values(), Counter[Key](), Counter[tuple[Key, int]]()
        for entry in entries:
            if entry.parent is not None:
                children[entry.parent.key] += 1
            if entry.key != entry.base:
                tails[entry.base, entry.position % self.config.block] += 1
        spans = [(e.snapshot.first, e.snapshot.position) for e in entries]
        orphans = [e.position for e in entries if e.parent and self._entries.get(e.parent.key) is not e.parent]
        facts = {
            "positions": (spans, [(e.first, e.position) for e in entries]),
            "parents": (orphans, []),
            "idle": ([e.position for e in entries if not e.has_state and not e.children], []),
            "size": ([e.size for e in entries], [e.snapshot.nbytes for e in entries]),
            "children": ({e.key: e.children for e in entries if e.children}, dict(children)),
            "tails": ({(b, n): c for b, lengths in self._tails.items() for n, c in lengths.items()}, dict(tails)),
            "bytes": (self.stats.bytes, sum(e.size for e in entries)),
            "entries": (self.stats.entries, sum(e.has_state for e in entries)),
            "over budget": (max(self.stats.bytes - self.config.budget, 0), 0),
        }  # fmt: skip
        for name, (got, expected) in facts.items():
            if got != expected:
                raise InvariantError("prefix cache", name, expected=expected, got=got)
