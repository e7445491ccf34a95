"""The store of snapshots without a session: what is found, what is shared, what is dropped, what it may hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_replayssm.errors import ConfigError, InvariantError
from trtllm_replayssm.runtime.prefix.cache import PrefixCache
from trtllm_replayssm.runtime.prefix.settings import PrefixConfig, PrefixStats

STATE, KV = 100, 2  # bytes of a state, and of one position's keys and values


@dataclass(frozen=True)
class Piece:
    """A snapshot that remembers which tokens it was made from."""

    tokens: tuple[int, ...]
    first: int
    has_state: bool = True

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return KV * (self.position - self.first) + STATE * self.has_state

    def kv_only(self) -> Piece:
        return replace(self, has_state=False)

    def arrays(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        return {}


class Store:
    """A cache, and offers in terms of tokens."""

    def __init__(self, budget: int, block: int = 4) -> None:
        self.stats = PrefixStats()
        self.cache = PrefixCache(PrefixConfig(block=block, budget=budget), "model", self.stats)
        self.saves = 0

    def offer(self, tokens: tuple[int, ...]) -> None:
        def save(since: int) -> Piece:
            self.saves += 1
            return Piece(tokens, since)

        self.cache.offer(self.cache.keys(tokens), len(tokens), save)
        self.cache.check_integrity()

    def find(self, tokens: tuple[int, ...], limit: int | None = None) -> tuple[int, ...] | None:
        """The tokens of the hit; its chain must cover them."""
        hit = self.cache.find(self.cache.keys(tokens), len(tokens) if limit is None else limit)
        if hit is None:
            return None
        assert isinstance(hit.snapshot, Piece) and hit.snapshot.has_state
        covered = 0
        for part in (*hit.before, hit.snapshot):
            assert isinstance(part, Piece) and part.first <= covered
            assert part.tokens == hit.snapshot.tokens[: part.position]
            covered = part.position
        self.cache.used(hit)
        return hit.snapshot.tokens


def seq(*parts: int) -> tuple[int, ...]:
    """Four tokens of each part."""
    return tuple(token for part in parts for token in [part] * 4)


def test_the_deepest_snapshot_within_the_limit_is_found() -> None:
    store = Store(10_000)
    for tokens in (seq(1), seq(1, 2), seq(1, 2, 3), (*seq(1, 2), 9, 9)):
        store.offer(tokens)
    assert store.find(seq(1, 2, 3, 4)) == seq(1, 2, 3)
    assert store.find(seq(1, 2, 3), limit=11) == seq(1, 2)
    assert store.find((*seq(1, 2), 9, 9, 5)) == (*seq(1, 2), 9, 9)  # ends inside a block
    assert store.find((*seq(1, 2), 9, 8, 5)) == seq(1, 2)
    assert store.find(seq(2)) is None


def test_nested_prefixes_share_their_keys_and_values_and_a_known_one_is_not_saved_again() -> None:
    store = Store(10_000)
    store.offer(seq(1))
    store.offer(seq(1, 2))
    store.offer(seq(1, 3))
    assert store.stats.bytes == 3 * STATE + KV * (4 + 5 + 5)  # the last shared position is held again
    store.offer(seq(1, 2))
    assert (store.saves, store.stats.insertions, store.stats.entries) == (3, 3, 3)


def test_b14_a_dropped_state_with_kept_keys_and_values_is_no_hit_until_it_is_made_again() -> None:
    store = Store(budget=2 * STATE + 30 * KV)
    store.offer(seq(1))
    store.offer(seq(1, 2))
    for _ in range(5):
        assert store.find(seq(1, 2)) == seq(1, 2)
    store.offer(seq(1, 2, 3))  # the budget holds two states: the unused one of seq(1) goes, what it shares stays
    assert store.stats.evictions == 1
    assert store.find(seq(1, 2, 3)) == seq(1, 2, 3)
    assert store.find(seq(1)) is None and store.find(seq(1, 9)) is None
    before = store.stats.bytes
    store.cache.config = replace(store.cache.config, budget=10_000)
    store.offer(seq(1))
    assert store.find(seq(1, 9)) == seq(1)
    assert store.stats.bytes == before + STATE


def test_what_is_used_stays_and_what_is_not_falls_behind() -> None:
    store = Store(budget=3 * (STATE + 4 * KV))
    for part in (1, 2, 3):
        store.offer(seq(part))
    for _ in range(3):
        assert store.find(seq(1)) == seq(1)
    for part in range(4, 8):
        store.offer(seq(part))
        assert store.find(seq(1)) == seq(1)
    for part in range(20, 60):  # no use from here on: the clock passes its worth
        store.offer(seq(part))
    assert store.find(seq(1)) is None


def test_of_two_unused_states_the_one_that_spares_fewer_tokens_per_byte_goes() -> None:
    store = Store(budget=3 * STATE + 20 * KV)
    store.offer(seq(1, 1, 1))  # spares twelve tokens
    store.offer(seq(2))  # spares four
    store.offer(seq(1, 1, 1, 5))  # spares four beyond the first
    store.offer(seq(3))
    assert store.find(seq(1, 1, 1, 7)) == seq(1, 1, 1)
    assert store.find(seq(3)) == seq(3)


def test_a_snapshot_that_can_never_fit_is_refused_and_nothing_is_dropped_for_it() -> None:
    store = Store(budget=STATE + 6 * KV)
    store.offer(seq(1))
    store.offer(seq(2, 2))
    assert (store.stats.refused, store.stats.evictions) == (1, 0)
    store.offer(seq(1, 3))  # its own five positions fit, but not beside the four it needs
    assert store.stats.refused == 2 and store.find(seq(1, 3)) == seq(1)


def test_b16_a_snapshot_of_other_tokens_than_its_key_says_is_a_bug_and_not_stored() -> None:
    store = Store(10_000)
    keys = store.cache.keys(seq(1, 2))
    with pytest.raises(InvariantError, match=r"expected positions 0\.\.8, as its key says, got 0\.\.7"):
        store.cache.offer(keys, 8, lambda since: Piece(seq(1, 2)[:7], since))
    assert store.find(seq(1, 2)) is None
    store.cache.check_integrity()


def test_a_broken_prompts_states_are_forgotten() -> None:
    store = Store(10_000)
    for tokens in (seq(1), seq(1, 2), seq(1, 2, 3), seq(4)):
        store.offer(tokens)
    store.cache.drop(store.cache.keys(seq(1, 2, 9)), 12)
    assert store.find(seq(1, 2, 9)) is None and store.find(seq(4)) == seq(4)
    assert store.find(seq(1, 2, 3)) == seq(1, 2, 3)  # not on that path
    store.cache.check_integrity()


@pytest.mark.parametrize("field, value", [("bytes", 1), ("entries", 1)])
def test_the_integrity_check_sees_wrong_sums(field: str, value: int) -> None:
    store = Store(10_000)
    store.offer(seq(1))
    setattr(store.stats, field, getattr(store.stats, field) + value)
    with pytest.raises(InvariantError, match=field):
        store.cache.check_integrity()


def test_the_integrity_check_sees_a_lost_parent_and_a_budget_that_is_exceeded() -> None:
    store = Store(10_000)
    store.offer(seq(1))
    store.offer(seq(1, 2))
    deep = max(store.cache._entries.values(), key=lambda e: e.position)
    assert deep.parent is not None
    deep.parent.children = 0
    with pytest.raises(InvariantError, match="children"):
        store.cache.check_integrity()
    deep.parent.children = 1
    store.cache.config = replace(store.cache.config, budget=100)
    with pytest.raises(InvariantError, match="over budget"):
        store.cache.check_integrity()


@pytest.mark.parametrize("field", ["block", "budget", "history"])
def test_settings_below_one_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        PrefixConfig(**{"budget": 1, field: 0})


paths = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(lambda parts: seq(*parts))
pieces = st.tuples(paths, st.integers(0, 3)).map(lambda p: p[0][: len(p[0]) - p[1]])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["offer", "offer", "find", "drop"]), pieces), max_size=60),
       st.integers(1, 900))  # fmt: skip
def test_random_traffic_keeps_the_budget_and_never_finds_other_tokens(
    events: list[tuple[str, tuple[int, ...]]], budget: int
) -> None:
    store = Store(budget)
    offered: set[tuple[int, ...]] = set()
    for what, tokens in events:
        if what == "offer":
            store.offer(tokens)
            offered.add(tokens)
        elif what == "drop":
            store.cache.drop(store.cache.keys(tokens), len(tokens))
            assert store.find(tokens) is None
        else:
            found = store.find(tokens)
            assert found is None or (found in offered and tokens[: len(found)] == found)
        store.cache.check_integrity()
        assert store.stats.bytes <= budget
