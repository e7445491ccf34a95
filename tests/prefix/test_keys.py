"""Keys of prefixes: equal for equal tokens from the start on, and for nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtllm_replayssm.runtime.prefix.history import PrefixHistory
from trtllm_replayssm.runtime.prefix.keys import BlockKeys, root_key

ROOT = root_key("model, formats")
tokens = st.lists(st.integers(0, 3), max_size=12)


@given(tokens, tokens, st.integers(1, 4), st.integers(0, 12), st.integers(0, 12))
def test_two_prefixes_have_one_key_exactly_when_their_tokens_are_equal(
    a: list[int], b: list[int], block: int, i: int, j: int
) -> None:
    i, j = min(i, len(a)), min(j, len(b))
    same = BlockKeys(ROOT, block, a).at(i) == BlockKeys(ROOT, block, b).at(j)
    assert same == (a[:i] == b[:j])


@given(tokens, st.integers(1, 4))
def test_a_boundary_is_the_key_of_its_position(ids: list[int], block: int) -> None:
    keys = BlockKeys(ROOT, block, ids)
    assert keys.boundaries == len(ids) // block
    assert [keys.boundary(i) for i in range(keys.boundaries + 1)] == [
        keys.at(i * block) for i in range(keys.boundaries + 1)
    ]


def test_another_model_or_format_has_other_keys() -> None:
    one, other = (BlockKeys(root_key(name), 2, [1, 2, 3]) for name in ("a, float32", "a, float16"))
    assert all(one.at(i) != other.at(i) for i in range(4))


def test_large_token_ids_do_not_collide() -> None:
    assert BlockKeys(ROOT, 2, [1, 0]).at(2) != BlockKeys(ROOT, 2, [1 + (1 << 32), 0]).at(2)


def test_the_history_counts_leading_blocks_and_forgets_the_oldest() -> None:
    history = PrefixHistory(4)
    first = BlockKeys(ROOT, 2, [1, 2, 3, 4, 5])
    assert history.shared(first) == 0
    history.add(first)
    assert history.shared(BlockKeys(ROOT, 2, [1, 2, 3, 4, 6, 6])) == 2
    assert history.shared(BlockKeys(ROOT, 2, [1, 2, 9, 9, 5, 5])) == 1
    assert history.shared(BlockKeys(ROOT, 2, [9, 2, 3, 4])) == 0
    history.add(BlockKeys(ROOT, 2, [7, 7, 7, 7, 7, 7]))
    assert history.shared(first) == 1  # the first blocks of a sequence stay longest
