"""Philox4x32-10 against the published vectors, and the keying of draws."""

from __future__ import annotations

import numpy as np
import pytest

from trtllm_replayssm.spec.philox import Domain, choice_seed, philox4x32, state_words, uniform

# Random123's known answers: counter, key (low word first), result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    seed = key[0] | key[1] << 32
    assert tuple(philox4x32(np.array(counter, np.uint32), seed)) == result
    signed = seed - 2**64 if seed >= 2**63 else seed  # the seed as an int64 buffer holds it
    assert tuple(philox4x32(np.array(counter, np.uint32), int(np.int64(signed)))) == result
    stacked = philox4x32(np.array([counter, counter], np.uint32), seed)
    assert stacked.shape == (2, 4) and (stacked == np.array(result, np.uint32)).all()


def test_state_words_follow_the_counter_layout_element_by_element() -> None:
    seed, layer, heads, elems, position = 0x1234_5678_9ABC_DEF0, 7, 3, 10, 41
    words = state_words(seed, layer, heads, elems, position)
    assert words.shape == (heads, elems) and words.dtype == np.uint32
    for head in range(heads):
        for element in range(elems):
            counter = np.array([element // 4, layer << 16 | head, position, Domain.STATE], np.uint32)
            assert words[head, element] == philox4x32(counter, seed)[element % 4]


def test_draws_differ_by_request_head_layer_position_and_purpose() -> None:
    base = state_words(1, 2, 2, 4096, 3)
    others = {
        "seed low": state_words(2, 2, 2, 4096, 3),
        "seed high": state_words(1 + (1 << 32), 2, 2, 4096, 3),
        "layer": state_words(1, 3, 2, 4096, 3),
        "position": state_words(1, 2, 2, 4096, 4),
        "head": base[::-1],
    }
    for name, other in others.items():
        assert (base == other).mean() < 1e-3, name
        correlation = np.corrcoef(base.ravel().astype(float), other.ravel().astype(float))[0, 1]
        assert abs(correlation) < 5 / np.sqrt(base.size), name
    assert len({uniform(1, 5, domain) for domain in Domain}) == len(Domain)
    assert (state_words(1, 2, 2, 4096, 3) == base).all()


def test_uniform_is_in_the_unit_interval_and_flat() -> None:
    values = np.array([uniform(9, i, Domain.TOKEN) for i in range(20_000)])
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 400.0) ** 2 / 400.0).sum() < 110.0  # chi-square, 49 degrees: exceeded with 1e-6
    assert uniform(9, np.int32(70_000), Domain.TOKEN) == uniform(9, 70_000, Domain.TOKEN)


def test_choices_of_a_request_have_their_own_seeds() -> None:
    seeds = [choice_seed(77, choice) for choice in range(8)]
    assert seeds[0] == 77 and len(set(seeds)) == 8
    assert all(0 <= s < 2**64 for s in seeds)
    assert seeds == [choice_seed(77, choice) for choice in range(8)]
